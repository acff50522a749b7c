"""A model that is bigger than memory: ours from its packed form against llama.cpp's mmap.

    python benchmarks/compare_streaming.py MODEL.gguf PACKED --experts 0.5

PACKED is what ``moestro convert MODEL.gguf PACKED`` wrote: the same weights. Both run in a control
group with the same memory, page cache included, which holds the dense weights, the part of the
experts that is asked for, and what a process needs beside its model; both start with nothing of the
files in memory, use the same threads and take turns. The drive's rate is measured in the same run:
random unbuffered reads of one expert's size by eight threads.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import statistics
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import cast

from memory_group import MemoryGroup, forget
from moestro import __version__
from moestro.checkpoints.packed import PackedEntry, read_manifest
from peers import cache as peers_cache
from peers.llama_cpp import LlamaCpp
from peers.worker import Worker

#: what a process holds beside the model: interpreter, libraries, KV cache, buffers
BESIDE_NBYTES = 600 << 20
_READERS = 8


def banks(packed: Path) -> list[PackedEntry]:
    return [entry for entry in read_manifest(packed).entries.values() if entry.blob_nbytes]


def drive_rate(packed: Path, seconds: float = 2.0) -> float:
    """Bytes per second of random unbuffered reads of whole experts."""
    entries = banks(packed)
    done = [0] * _READERS
    end = time.monotonic() + seconds

    def read(index: int) -> None:
        chosen = random.Random(index)
        buffers = mmap.mmap(-1, max(entry.blob_nbytes for entry in entries))
        while time.monotonic() < end:
            entry = chosen.choice(entries)
            handle = os.open(entry.info.file, os.O_RDONLY | os.O_DIRECT)
            at = entry.info.offset + chosen.randrange(entry.shape[0]) * entry.blob_nbytes
            view = memoryview(buffers)[: entry.blob_nbytes]
            done[index] += os.preadv(handle, [view], at)
            os.close(handle)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(_READERS)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.monotonic() - start)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="GGUF")
    parser.add_argument("packed", type=Path)
    parser.add_argument("--experts", type=float, default=0.5, help="part of them in memory")
    parser.add_argument("--tokens", type=int, default=32, help="tokens decoded per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", type=Path, default=peers_cache.DEFAULT, help="peers")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    return parser.parse_args()


def main() -> int:
    options = parse()
    llama = LlamaCpp(options.cache)
    llama.require()
    experts = sum(entry.info.nbytes for entry in banks(options.packed))
    dense = sum(file.stat().st_size for file in options.packed.iterdir()) - experts
    model = int(dense + options.experts * experts)
    cap = model + BESIDE_NBYTES
    forget(options.model)
    forget(options.packed)
    context = str(options.tokens + 600)
    rates: list[float] = []
    rows: dict[str, list[tuple[float, float]]] = {"decode": [], "prefill": []}
    with ExitStack() as stack:
        groups = [stack.enter_context(MemoryGroup(name, cap)) for name in ("ours", "llama")]
        log = llama.folder / "logs"
        command = [sys.executable, str(Path(__file__).parent / "peers/ours_model.py")]
        command += [str(options.packed), str(options.threads), context, f"{model + (64 << 20)}"]
        path = f"{Path(__file__).parent}:{os.pathsep.join(sys.path)}"
        ours = stack.enter_context(
            Worker(
                groups[0].wrap(command),
                environment={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                log=log / "streaming-ours.log",
            )
        )
        driver = [str(llama.driver("llama_model")), str(options.model), str(options.threads)]
        theirs = stack.enter_context(
            Worker(groups[1].wrap([*driver, context]), environment={}, log=log / "streaming.log")
        )
        tasks = {
            "decode": (f"decode 0 {options.tokens}", options.tokens),
            "prefill": ("prefill 512", 512),
        }
        stats = []
        for _ in range(options.rounds):
            for task, (request, tokens) in tasks.items():
                rates.append(drive_rate(options.packed))
                mine = float(ours.ask(request)["seconds"]) / tokens
                stats.append({"task": task, **ours.ask("stats")})
                rows[task].append((mine, float(theirs.ask(request)["seconds"]) / tokens))
        peaks = [group.peak for group in groups]
    report = summary(rows, stats, statistics.median(rates))
    report |= {
        "moestro": __version__, "peer": llama.version, "model": options.model.name,
        "threads": options.threads, "cap": cap, "model_nbytes": dense + experts,
        "peak_ours": peaks[0], "peak_peer": peaks[1], "drive_spread": [min(rates), max(rates)],
    }  # fmt: skip
    print(json.dumps(report, indent=1) if options.json else text(report))
    return 0


def summary(
    rows: dict[str, list[tuple[float, float]]], stats: list[dict[str, object]], drive: float
) -> dict[str, object]:
    found: dict[str, object] = {"drive": drive}
    for task, times in rows.items():
        mine = [stat for stat in stats if stat["task"] == task]
        found[task] = {
            "ours_tokens_s": 1 / statistics.median(ours for ours, _ in times),
            "peer_tokens_s": 1 / statistics.median(peer for _, peer in times),
            "ratio": statistics.median(peer / ours for ours, peer in times),
            "ratio_min": min(peer / ours for ours, peer in times),
            "ratio_max": max(peer / ours for ours, peer in times),
            "hit_rate": statistics.median(float(str(stat["hit_rate"])) for stat in mine),
            "of_drive": statistics.median(float(str(stat["rate"])) for stat in mine) / drive,
            "first": {"ours": times[0][0], "peer": times[0][1]},
        }
    return found


def text(report: dict[str, object]) -> str:
    gib = 1 << 30
    lines = [
        f"{report['model']}: {int(str(report['model_nbytes'])) / gib:.2f} GiB in "
        f"{int(str(report['cap'])) / gib:.2f} GiB, {report['threads']} threads; drive "
        f"{float(str(report['drive'])) / 1e9:.2f} GB/s"
    ]
    for task in ("decode", "prefill"):
        row = cast("dict[str, float]", report[task])
        spread = f"{row['ratio_min']:.2f} to {row['ratio_max']:.2f}"
        lines.append(
            f"{task:8} ours {row['ours_tokens_s']:7.2f} tok/s  llama.cpp "
            f"{row['peer_tokens_s']:7.2f}  {row['ratio']:.2f}x ({spread})  hits "
            f"{row['hit_rate']:.0%}, misses at {row['of_drive']:.0%} of the drive's rate"
        )
    lines.append(
        f"peak memory ours {int(str(report['peak_ours'])) / gib:.2f} GiB, llama.cpp "
        f"{int(str(report['peak_peer'])) / gib:.2f} GiB"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
