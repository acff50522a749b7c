"""The block reader as Python sees it: bytes, errors as types of our own, refusals of io_uring."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moestro import native
from moestro.core.errors import InvalidRequest, StorageError, UnsupportedOp

BLOCK = 4096
CONTENT = np.random.default_rng(0).integers(0, 256, 64 * BLOCK, dtype=np.uint8)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "blocks"
    path.write_bytes(CONTENT.tobytes())
    return path


def read(reader: native.BlockReader, offset: int, nbytes: int) -> np.ndarray:
    to = native.allocate_bytes(nbytes)
    reader.submit(0, offset, to).wait()
    return to


@pytest.mark.parametrize("engine", ["auto", "pread"])
@pytest.mark.parametrize("direct", [True, False])
def test_bytes_are_those_of_the_file(file: Path, engine: str, direct: bool) -> None:
    reader = native.BlockReader(
        [[str(file)]], queue_depth=3, direct=direct, engine=engine, piece_nbytes=5 * BLOCK
    )
    buffers = [native.allocate_bytes(n * BLOCK) for n in (1, 7, 32, 64)]
    reads = [reader.submit(0, CONTENT.size - b.size, b) for b in buffers]
    for pending, buffer in zip(reads, buffers, strict=True):
        pending.wait()
        assert pending.ended()
        np.testing.assert_array_equal(buffer, CONTENT[CONTENT.size - buffer.size :])
    stats = reader.stats()
    assert (stats["reads"], stats["nbytes"], stats["failed"]) == (4, 104 * BLOCK, 0)
    assert stats["direct"] == direct or stats["mirrors"][0]["buffered"]
    assert stats["engine"] == ("pread" if engine == "pread" or stats["engine_note"] else "io_uring")


def test_errors_have_types(file: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no-such"):
        native.BlockReader([[str(tmp_path / "no-such")]])
    with pytest.raises(InvalidRequest, match="auto, io_uring, pread"):
        native.BlockReader([[str(file)]], engine="mmap")
    reader = native.BlockReader([[str(file)]])
    with pytest.raises(InvalidRequest, match="whole blocks"):
        read(reader, 512, BLOCK)
    with pytest.raises(StorageError, match="the file has 262144 bytes"):
        read(reader, 64 * BLOCK, BLOCK)
    os.truncate(file, 32 * BLOCK)
    with pytest.raises(StorageError, match=r"wanted 8192 bytes at 253952, got 0: its size"):
        read(reader, 62 * BLOCK, 2 * BLOCK)


def test_a_read_nobody_waits_for_ends_before_its_buffer_goes(file: Path) -> None:
    reader = native.BlockReader([[str(file)]])
    for _ in range(20):
        reader.submit(0, 0, native.allocate_bytes(CONTENT.size))
    assert (read(reader, 0, BLOCK) == CONTENT[:BLOCK]).all()


# A seccomp filter that answers EPERM to one system call (from <linux/seccomp.h>, <linux/filter.h>).
_FILTERED = """
import ctypes, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
call, path = int(sys.argv[1]), sys.argv[2]
program = b"".join(struct.pack("HBBI", *i) for i in [
    (0x20, 0, 0, 0), (0x15, 0, 1, call), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7fff0000)])
memory = ctypes.create_string_buffer(program)
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_void_p)]
f = Filter(4, ctypes.addressof(memory))
assert libc.prctl(38, 1, 0, 0, 0) == 0
if libc.prctl(22, 2, ctypes.byref(f), 0, 0) != 0:
    sys.exit(77)
from moestro import native
reader = native.BlockReader([[path]])
to = native.allocate_bytes(8192)
reader.submit(0, 4096, to).wait()
assert to.tobytes() == open(path, "rb").read()[4096:12288]
stats = reader.stats()
assert stats["engine"] == "pread", stats
print(stats["engine_note"], native.uring_refusal())
try:
    native.BlockReader([[path]], engine="io_uring")
except Exception as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("call", [425, 426])  # io_uring_setup, io_uring_enter
def test_where_io_uring_is_forbidden_threads_read(file: Path, call: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FILTERED, str(call), str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if done.returncode == 77:
        pytest.skip("seccomp filters cannot be set here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("forbidden here") == 2
    assert UnsupportedOp.__name__ in done.stdout


def test_an_idle_pool_takes_no_cpu(file: Path) -> None:
    """Threads of a pool sleep: the process's CPU time stands still while nothing is read."""
    reader = native.BlockReader([[str(file)]], engine="pread")
    read(reader, 0, BLOCK)
    libc = ctypes.CDLL(None)
    before = os.times()
    libc.usleep(200_000)
    after = os.times()
    assert (after.user - before.user) + (after.system - before.system) < 0.1
