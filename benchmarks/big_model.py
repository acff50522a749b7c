"""Loading a whole model from disk: its rate beside plain reads of the same bytes, its peak memory.

Used by ``bench_load.py --model-gib``. The model is random: a GGUF file of a usual mixture's shape
in Q4_K, written a piece at a time, and the packed directory that is converted from it. Every load
and read runs in a process of its own, so that peaks are of one load alone.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from memory_group import forget
from moestro import devices
from moestro.checkpoints import open_checkpoint
from moestro.formats.base import packed_buffer
from moestro.memory.convert import convert
from moestro.memory.loader import load_weights
from moestro.memory.policy import FormatPolicy
from moestro.memory.weights import ExpertSources, WeightSpec

HIDDEN, INTERMEDIATE, EXPERTS = 2048, 768, 128
VOCABULARY = 32768
_TYPE = gguf.GGMLQuantizationType.Q4_K
_BLOCK, _BLOCK_NBYTES = 256, 144
_LAYER_NBYTES = 3 * EXPERTS * HIDDEN * INTERMEDIATE // _BLOCK * _BLOCK_NBYTES
_READ = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Load:
    """gb_s: of file bytes. read_gb_s: plain reads of the same files into fresh memory by as many
    threads, the neighbouring ones' mean. above_final: peak resident bytes over those at the end.
    """

    container: str
    cached: bool
    nbytes: int
    seconds: float
    gb_s: float
    read_gb_s: float
    fraction: float
    final_rss: int
    above_final: int


def specs(layers: int) -> list[WeightSpec]:
    """The model: an embedding and ``layers`` layers of experts."""
    found = [
        WeightSpec(
            key="embed_tokens",
            kind="matrix",
            role="embedding",
            shape=(VOCABULARY, HIDDEN),
            sources=("token_embd.weight",),
        )
    ]
    for layer in range(layers):
        names = {n: (f"blk.{layer}.ffn_{n}_exps.weight",) for n in ("gate", "up", "down")}
        found.append(
            WeightSpec(
                key=f"layers.{layer}.experts",
                kind="experts",
                role="experts",
                shape=(EXPERTS, INTERMEDIATE, HIDDEN),
                expert_sources=ExpertSources(**names),
                layer=layer,
            )
        )
    return found


def layers_of(gib: float) -> int:
    return max(1, round(gib * 2**30 / _LAYER_NBYTES))


def write_gguf(path: Path, layers: int) -> None:
    """Random blocks with small scales, a layer's worth of memory at most."""
    writer = gguf.GGUFWriter(path, "benchmark")
    shapes = [("token_embd.weight", (VOCABULARY, HIDDEN))]
    for layer in range(layers):
        for name in ("gate", "up", "down"):
            wide = (HIDDEN, INTERMEDIATE) if name == "down" else (INTERMEDIATE, HIDDEN)
            shapes.append((f"blk.{layer}.ffn_{name}_exps.weight", (EXPERTS, *wide)))
    sizes = []
    for name, shape in shapes:
        sizes.append(int(np.prod(shape)) // _BLOCK * _BLOCK_NBYTES)
        stored = (*shape[:-1], shape[-1] // _BLOCK * _BLOCK_NBYTES)
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), sizes[-1], raw_dtype=_TYPE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (1 << 16, _BLOCK_NBYTES), dtype=np.uint8)
    blocks[:, :4].view(np.float16)[:] = 0.01
    piece = blocks.tobytes()
    with path.open("ab") as file:
        for nbytes in sizes:
            file.write(b"\0" * (-file.tell() % 32))
            for start in range(0, nbytes, len(piece)):
                file.write(piece[: nbytes - start])


def files_of(path: Path) -> list[Path]:
    return (
        [path] if path.is_file() else sorted(p for p in path.iterdir() if p.stat().st_size > 2**16)
    )


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {name}")


def _load(path: Path, layers: int, threads: int) -> dict[str, Any]:
    devices.get("cpu").set_threads(threads)
    start = time.perf_counter()
    with open_checkpoint(path) as checkpoint:
        weights = load_weights(checkpoint, specs(layers), policy=FormatPolicy.parse(""))
    seconds = time.perf_counter() - start
    found = {"seconds": seconds, "final": _memory("VmRSS"), "peak": _memory("VmHWM")}
    del weights
    return found


def _read(path: Path, threads: int) -> dict[str, Any]:
    files = files_of(path)
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        for file in files:
            nbytes = file.stat().st_size
            out = packed_buffer(nbytes).numpy()
            handle = os.open(file, os.O_RDONLY)
            pieces = ((handle, [out[at : at + _READ]], at) for at in range(0, nbytes, _READ))
            list(pool.map(lambda piece: os.preadv(*piece), pieces))
            os.close(handle)
    return {"seconds": time.perf_counter() - start}


def _alone(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of a function in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work)


def measure(path: Path, layers: int, threads: int, *, cached: bool) -> Load:
    nbytes = sum(file.stat().st_size for file in files_of(path))

    def timed(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if not cached:
            forget(path)
        return _alone(work)

    read = partial(_read, path, threads)
    if cached:
        timed(read)
    before = timed(read)["seconds"]
    load = timed(partial(_load, path, layers, threads))
    bound = (before + timed(read)["seconds"]) / 2
    return Load(
        container=path.name,
        cached=cached,
        nbytes=nbytes,
        seconds=load["seconds"],
        gb_s=nbytes / load["seconds"] / 1e9,
        read_gb_s=nbytes / bound / 1e9,
        fraction=bound / load["seconds"],
        final_rss=load["final"],
        above_final=load["peak"] - load["final"],
    )


def run(folder: Path, gib: float, threads: int) -> list[Load]:
    """The GGUF file, then the packed directory converted from it, each cached and from disk."""
    layers = layers_of(gib)
    source, packed = folder / "model.gguf", folder / "packed"
    write_gguf(source, layers)
    found = [measure(source, layers, threads, cached=cached) for cached in (True, False)]
    with open_checkpoint(source) as checkpoint:
        convert(checkpoint, specs(layers), packed, policy=FormatPolicy.parse(""))
    source.unlink()
    return found + [measure(packed, layers, threads, cached=cached) for cached in (True, False)]
