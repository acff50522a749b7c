"""Random damage to headers: only typed errors escape, nothing reads or allocates beyond the file.

Deterministic: every case follows from its number. The byte source fails the test when a parser
asks for bytes that are not there, and what parses must be consistent with the file.
"""

from __future__ import annotations

import json
import random
import signal
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors as oracle
from checkpoint_bytes import ARCHITECTURE, Memory, entry, gguf, pair, string, tensor, u32, u64
from checkpoint_bytes import safetensors as safetensors_bytes

from moestro.checkpoints import open_checkpoint
from moestro.checkpoints.base import TensorInfo
from moestro.checkpoints.gguf_header import parse as parse_gguf
from moestro.checkpoints.safetensors import parse_header as parse_safetensors
from moestro.core.errors import CheckpointError, UnsupportedArchitecture, UnsupportedFormat

CASES = 24_000
TYPED = (CheckpointError, UnsupportedFormat, UnsupportedArchitecture)
NUMBERS = [0, 1, 2, 3, 7, 8, 12, 31, 32, 33, 64, 255, 256, 65535, 1 << 20, (1 << 31) - 1, 1 << 31]
NUMBERS += [(1 << 32) - 1, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 1]


@contextmanager
def no_hang(seconds: int) -> Iterator[None]:
    """Turn a hang into a failure; far above the time that the cases take."""

    def fail(*_: object) -> None:
        raise AssertionError(f"no result after {seconds} s: a parser hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def damage(rng: random.Random, data: bytes) -> bytes:
    """One to four random wounds: flips, numbers put over others, cuts, repeats, insertions."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(out)) if out else 0
        kind = rng.randrange(8)
        if kind == 0 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and out:
            out[at] = rng.randrange(256)
        elif kind == 2:
            out[at : at + 8] = u64(rng.choice(NUMBERS))
        elif kind == 3:
            out[at : at + 4] = u32(rng.choice(NUMBERS) & 0xFFFFFFFF)
        elif kind == 4:
            del out[at:]
        elif kind == 5:
            del out[at : at + rng.randrange(1, 40)]
        elif kind == 6:
            out[at:at] = out[at : at + rng.randrange(1, 80)]
        else:
            source = rng.randrange(len(out) + 1)
            size = rng.randrange(1, 24)
            out[at : at + size] = out[source : source + size]
    return bytes(out)


def check_consistent(infos: dict[str, TensorInfo], size: int) -> None:
    end = 0
    for name, info in infos.items():
        assert info.name == name
        assert 0 <= info.offset <= info.offset + info.nbytes <= size
        assert all(0 <= n < 1 << 63 for n in info.shape)
        if info.nbytes:
            assert info.offset >= end, "overlap, or not in disk order"
            end = info.offset + info.nbytes


def run(
    cases: Callable[[random.Random], bytes],
    parse: Callable[[Memory], dict[str, TensorInfo]],
    seed: int,
) -> Counter[str]:
    """Parse CASES damaged files; returns how they ended."""
    ended: Counter[str] = Counter()
    for number in range(CASES):
        source = Memory(cases(random.Random(seed * 1_000_003 + number)))
        try:
            check_consistent(parse(source), source.size)
            ended["parsed"] += 1
        except TYPED as error:
            ended[type(error).__name__] += 1
            assert 0 < len(str(error)) < 1500
        # Headers are read once; a window may be read again where a string crosses its end.
        assert source.total <= 2 * source.size
    return ended


# --- GGUF ------------------------------------------------------------------------------------


def gguf_sample() -> bytes:
    nested = u32(9) + u64(2) + u32(5) + u64(1) + u32(7) + u32(8) + u64(1) + string("x")
    pairs = [
        ARCHITECTURE,
        pair("general.alignment", 4, u32(32)),
        pair("a.bool", 7, b"\1"),
        pair("a.f64", 12, bytes(8)),
        pair("a.words", 9, u32(8) + u64(5) + b"".join(string("tok" * i) for i in range(5))),
        pair("a.ints", 9, u32(4) + u64(6) + bytes(24)),
        pair("a.nested", 9, nested),
        pair("split.count", 2, b"\1\0"),
    ]
    tensors = [
        tensor("token_embd.weight", [32, 4], 8, 0),
        tensor("blk.0.ffn_up_exps.weight", [64, 2, 2], 2, 160),
        tensor("blk.0.norm.weight", [8], 0, 320),
    ]
    return gguf(pairs, tensors, bytes(352))


def parse_gguf_infos(source: Memory) -> dict[str, TensorInfo]:
    return parse_gguf(source).infos


def build_gguf(rng: random.Random) -> bytes:
    """A well-formed file of absurd numbers: what byte damage rarely reaches."""

    def number(usual: int) -> int:
        return rng.choice(NUMBERS) if rng.random() < 0.15 else usual

    pairs = [ARCHITECTURE]
    for i in range(rng.randrange(3)):
        kind = number(rng.randrange(13)) & 0xFFFFFFFF
        item = rng.randrange(13)
        count = number(rng.randrange(4))
        pairs.append(pair(f"k{i}", kind, u32(item) + u64(count) + bytes(rng.randrange(64))))
    tensors, offset = [], 0
    for i in range(rng.randrange(5)):
        rank = rng.randrange(6) if rng.random() < 0.1 else rng.randrange(1, 4)
        ne = [number(rng.choice((32, 256, 1, 2))) for _ in range(rank)]
        kind = number(rng.choice((0, 1, 2, 8, 12, 14, 30, 39))) & 0xFFFFFFFF
        tensors.append(tensor(f"t{rng.randrange(12) if i else 0}", ne, kind, number(offset)))
        offset += 32 * rng.randrange(1, 20)
    counts = (number(len(tensors)), number(len(pairs)))
    version = u32(number(rng.choice((2, 3))) & 0xFFFFFFFF)
    return gguf(pairs, tensors, bytes(rng.randrange(4096)), counts=counts, version=version)


def test_gguf_headers() -> None:
    sample = gguf_sample()
    assert len(parse_gguf_infos(Memory(sample))) == 3

    def case(rng: random.Random) -> bytes:
        return build_gguf(rng) if rng.random() < 0.3 else damage(rng, sample)

    with no_hang(240):
        ended = run(case, parse_gguf_infos, seed=1)
    # The damage must be of every strength: some files stay readable, most do not.
    assert sum(ended.values()) == CASES >= 20_000
    assert ended["parsed"] > CASES // 50 and ended["UnsupportedFormat"] > CASES // 200
    assert ended["CheckpointError"] > CASES // 2


# --- safetensors -----------------------------------------------------------------------------

JUNK: list[Any] = [None, True, -1, 0, 1, 7, 2**31, 2**63, 2**64, 10**30, 1.5, 1e400, "", "F32", "x"]
JUNK += [[], [0], [0, 0], [[]], {}, {"dtype": "F32"}, "\ud800", [2**62, 2**62, 4], [0, 2**64]]
DTYPES = ("F32", "F16", "BF16", "U8", "I64", "F4", "F6_E2M3", "F99", "C64", "BOOL")


def safetensors_header() -> dict[str, Any]:
    return {
        "__metadata__": {"format": "pt"},
        "model.embed.weight": entry("BF16", [4, 8], 0, 64),
        "model.layers.0.gate.weight": entry("F32", [2, 4], 64, 96),
        "model.layers.0.scale": entry("F32", [], 96, 100),
        "empty": entry("F16", [0, 3], 100, 100),
        "half bytes": entry("F4", [4], 100, 102),
    }


SAFETENSORS_DATA = bytes(102)


def mutate_json(rng: random.Random) -> bytes:
    """A header whose JSON is valid and whose values are not."""
    header = safetensors_header()
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice(list(header) or ["model.embed.weight"])
        kind = rng.randrange(8)
        value = header.get(name)
        if kind == 0:
            header[name] = rng.choice(JUNK)
        elif kind == 1:
            header.pop(name, None)
        elif kind == 2:
            header[rng.choice(("new", name + "x", "", "\ud800", "\0"))] = value
        elif isinstance(value, dict) and "shape" in value:
            key = rng.choice(("dtype", "shape", "data_offsets"))
            if kind == 3:
                value.pop(key, None)
            elif kind == 4:
                value[key] = rng.choice(JUNK)
            elif kind == 5:
                value["dtype"] = rng.choice(DTYPES)
            else:
                inner = value.get(rng.choice(("shape", "data_offsets")))
                if isinstance(inner, list) and inner:
                    inner[rng.randrange(len(inner))] = rng.choice((*JUNK, 4, 8, 64, 96, 100, 102))
    data = bytes(rng.choice((102, 102, 102, 101, 103, 0, 64, 200)))
    raw = json.dumps(header).encode()
    length = rng.choice(NUMBERS) if rng.random() < 0.05 else len(raw)
    return safetensors_bytes(raw, data, length=length)


def test_safetensors_headers() -> None:
    sample = safetensors_bytes(safetensors_header(), SAFETENSORS_DATA)
    assert len(parse_safetensors(Memory(sample))) == 5
    accepted: list[bytes] = []

    def case(rng: random.Random) -> bytes:
        return mutate_json(rng) if rng.random() < 0.5 else damage(rng, sample)

    def parse(source: Memory) -> dict[str, TensorInfo]:
        infos = parse_safetensors(source)
        accepted.append(source.data)
        return infos

    with no_hang(240):
        ended = run(case, parse, seed=2)
    assert sum(ended.values()) == CASES >= 20_000
    assert ended["parsed"] > CASES // 50 and ended["UnsupportedFormat"] > CASES // 200
    assert ended["CheckpointError"] > CASES // 2
    # Whatever is accepted here, the format's own implementation accepts with the same ranges.
    for data in accepted:
        start = 8 + int.from_bytes(data[:8], "little")
        infos = parse_safetensors(Memory(data))
        expected = dict(oracle.deserialize(data))
        assert infos.keys() == expected.keys()
        for name, info in infos.items():
            assert list(info.shape) == expected[name]["shape"]
            assert data[info.offset : info.offset + info.nbytes] == bytes(expected[name]["data"])
            assert info.offset >= start


# --- memory and whole files ------------------------------------------------------------------


@pytest.mark.parametrize("container", ["gguf", "safetensors"])
def test_memory_stays_near_the_size_of_the_file(container: str) -> None:
    """Lying counts allocate nothing: the peak is a small multiple of the few KiB of the file (one
    Python object per declared item, an error message), where a believed count would be GiBs."""
    make = build_gguf if container == "gguf" else mutate_json
    parse = parse_gguf_infos if container == "gguf" else parse_safetensors
    sample = (
        gguf_sample()
        if container == "gguf"
        else safetensors_bytes(safetensors_header(), bytes(102))
    )
    tracemalloc.start()
    try:
        for number in range(1500):
            rng = random.Random(7_000_000 + number)
            source = Memory(make(rng) if number % 2 else damage(rng, sample))
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with suppress(TYPED):
                parse(source)
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak < 32 * source.size + 32_768, (number, source.size, peak)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", ["gguf", "safetensors"])
def test_damaged_files_through_the_front_door(tmp_path: Path, suffix: str) -> None:
    """Open and read everything: the same guarantee for real files and for the bytes behind them."""
    sample = (
        gguf_sample() if suffix == "gguf" else safetensors_bytes(safetensors_header(), bytes(102))
    )
    path = tmp_path / f"model.{suffix}"
    opened_files = 0
    for number in range(1000):
        path.write_bytes(damage(random.Random(9_000_000 + number), sample))
        try:
            with open_checkpoint(path) as opened:  # type: ignore[attr-defined]
                opened_files += 1
                for name in opened.names():
                    assert opened.read(name).numel() == opened.info(name).nbytes
        except TYPED:
            pass
    assert opened_files > 10


@pytest.mark.parametrize("suffix", ["gguf", "safetensors"])
def test_pure_noise(suffix: str) -> None:
    magic = b"GGUF" + u32(3) if suffix == "gguf" else b""
    parse = parse_gguf_infos if suffix == "gguf" else parse_safetensors
    for number in range(2000):
        rng = random.Random(number)
        head = magic if suffix == "gguf" else u64(rng.randrange(300)) + b"{"
        with pytest.raises(TYPED):
            parse(Memory(head + rng.randbytes(rng.randrange(300)) + b"."))
