"""Conversions of models larger than memory: what is held and cached, kills, full disks."""

import ctypes
import errno
import functools
import mmap
import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sparse_models import big_model, write_gguf, write_safetensors
from tiny_checkpoints import save_model, tiny_model

from moestro.checkpoints import open_checkpoint
from moestro.core.errors import OutOfBudget
from moestro.memory import pieces
from moestro.memory.convert import convert
from moestro.memory.policy import FormatPolicy

MIXED = FormatPolicy.parse("experts=int4-g32,attention=int8-g32,embedding=bf16")
MIB = 1 << 20


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


@pytest.fixture
def memory_disk():
    """A directory whose files never wait for a disk."""
    shm = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(dir=shm if shm.is_dir() else None))
    yield path
    shutil.rmtree(path)


def in_child(run, *, kill_after: float | None = None) -> tuple[bool, str]:
    """(whether it was killed, what ``run`` returned or the error it raised) in a forked process,
    that is killed after some seconds.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(read)
            torch.set_num_threads(1)
            try:
                text = str(run())
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            os.write(write, text.encode())
        finally:
            os._exit(0)
    os.close(write)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)  # it is ours until it is waited for
    with os.fdopen(read) as pipe:
        said = pipe.read()
    return os.WIFSIGNALED(os.waitpid(child, 0)[1]), said


def status(key: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def convert_within(limit: int, source: Path, specs, out: Path, policy: str) -> int:
    """Convert while the system gives the process no more than ``limit`` bytes beside those it has
    (the stacks of the threads among them); returns by how much the most it held grew.
    """
    before = status("VmRSS")
    bound = status("VmData") + limit
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    with open_checkpoint(source) as checkpoint:
        convert(checkpoint, specs, out, policy=FormatPolicy.parse(policy))
    return status("VmHWM") - before


def sources(tmp_path: Path, shapes) -> dict[str, tuple[Path, str]]:
    """A path and the policy to convert it with, by kind."""
    return {
        "safetensors": (write_safetensors(tmp_path / "whole", shapes), "int4-g32"),
        "shards": (write_safetensors(tmp_path / "shards", shapes, shards=2), "int8-g32"),
        "gguf": (write_gguf(tmp_path / "model.gguf", shapes), ""),
    }


def check_memory(tmp_path: Path, kind: str, embedding: int, expert: int, limit: int) -> None:
    shapes, specs = big_model(embedding, expert)
    source, policy = sources(tmp_path, shapes)[kind]
    out = tmp_path / "out"
    killed, said = in_child(lambda: convert_within(limit, source, specs, out, policy))
    assert not killed and said.isdigit(), said
    assert int(said) < limit
    with open_checkpoint(out) as packed:
        packed.verify()
        assert packed.names() == ["embed", "experts"]
    shutil.rmtree(out)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_memory_is_bounded_whatever_a_tensor_or_an_expert_takes(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 2 * MIB)
    check_memory(tmp_path, kind, embedding=200, expert=48, limit=176 * MIB)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "shards", "gguf"])
def test_memory_is_bounded_for_gigabytes(tmp_path, kind):
    check_memory(tmp_path, kind, embedding=1200, expert=768, limit=400 * MIB)


def test_what_does_not_fit_in_the_bound_is_noticed(tmp_path, monkeypatch):
    """The check above can fail: with whole tensors the same model does not fit."""
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 256 * MIB)
    with pytest.raises(AssertionError, match=r"MemoryError|OutOfBudget|memory"):
        check_memory(tmp_path, "safetensors", embedding=200, expert=48, limit=176 * MIB)


def cached_nbytes(path: Path) -> int:
    """Bytes of a file that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        pages = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
        failed = libc.mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), pages
        )
        del start
        assert not failed, os.strerror(ctypes.get_errno())
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_what_was_read_and_written_leaves_the_page_cache(tmp_path):
    shapes, specs = big_model(24, 12)
    probe = tmp_path / "probe"
    with open(probe, "wb") as file:
        file.write(bytes(4 * MIB))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_nbytes(probe) > MIB:
        pytest.skip("this file system keeps its files in the page cache")
    source = write_safetensors(tmp_path / "source", shapes)
    file = source / "model.safetensors"
    with open_checkpoint(source) as checkpoint:
        checkpoint.read("embed")
        assert cached_nbytes(file) > 20 * MIB
        convert(checkpoint, specs, tmp_path / "out", policy=FormatPolicy.parse("bf16"))
    assert cached_nbytes(file) < 2 * MIB
    for path in (tmp_path / "out").iterdir():
        assert path.stat().st_size < MIB or cached_nbytes(path) < 2 * MIB


def test_killed_at_random_moments_and_resumed_to_the_same_bytes(memory_disk):
    tensors, specs = tiny_model(layers=4)
    source = save_model(memory_disk / "source", tensors)

    def whole(out: Path) -> None:
        with open_checkpoint(source) as checkpoint:
            convert(checkpoint, specs, out, policy=MIXED)

    assert in_child(lambda: whole(memory_disk / "want")) == (False, "None")
    want = contents(memory_disk / "want")
    start = time.monotonic()
    in_child(lambda: whole(memory_disk / "timed"))
    seconds = time.monotonic() - start
    rng = random.Random(0)
    kills, finished = 0, 0
    while kills < 24 or finished < 2:
        out = memory_disk / f"out{finished}"
        partial = out.with_name(out.name + ".partial")
        killed, said = in_child(
            functools.partial(whole, out), kill_after=rng.uniform(0, 1.2 * seconds)
        )
        assert said in ("", "None"), said
        kills += killed
        if partial.exists():
            for name, data in contents(partial).items():
                assert name.endswith(".tmp") or name == "journal.json" or data == want.get(name)
        if out.exists():
            assert contents(out) == want and not partial.exists()
            finished += 1
        else:
            assert killed


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB, and a function that gives it another size."""
    path = tmp_path / "disk"
    path.mkdir()

    def mount(size: str, *more: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", ",".join([*more, f"size={size}"]), "none", path]
        return (
            shutil.which("mount") is not None
            and not subprocess.run(command, capture_output=True, check=False).returncode
        )

    if not mount("1m"):
        pytest.skip("no file system can be mounted here")
    yield path, lambda size: mount(size, "remount")
    subprocess.run(["umount", path], check=True)


def test_a_full_disk_is_said_and_work_goes_on_when_there_is_room(small_disk, tmp_path, monkeypatch):
    disk, resize = small_disk
    shapes, specs = big_model(1, 1)
    source = open_checkpoint(write_safetensors(tmp_path / "source", shapes))
    keep = FormatPolicy.parse("")
    # What else fills the disk comes after the question how much is free.
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 40))
    (disk / "other").write_bytes(bytes(900 << 10))
    with pytest.raises(OutOfBudget, match=r"the disk is full at .*shared\.safetensors\.tmp; free"):
        convert(source, specs, disk / "out", policy=keep)
    assert {path.name for path in disk.iterdir()} == {"other"}
    assert resize("3m")
    with pytest.raises(OutOfBudget, match=r"the disk is full at .*experts-000\.bin\.tmp; free some "
                       "space and run the same command again"):  # fmt: skip
        convert(source, specs, disk / "out", policy=keep)
    left = {path.name for path in (disk / "out.partial").iterdir()}
    assert left == {"journal.json", "shared.safetensors"} and not (disk / "out").exists()
    assert resize("8m")
    assert convert(source, specs, disk / "out", policy=keep).resumed == 1
    open_checkpoint(disk / "out").verify()
    # Not even a directory or the journal fits.
    (disk / "other").write_bytes(bytes(disk_free(disk)))
    with pytest.raises(OutOfBudget, match="the disk is full"):
        convert(source, specs, disk / "again", policy=keep)
    assert {path.name for path in disk.iterdir()} <= {"other", "out", "again.partial"}
    (disk / "other").unlink()
    convert(source, specs, disk / "again", policy=keep)
    assert contents(disk / "again") == contents(disk / "out")


def disk_free(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize + (path / "other").stat().st_size


def test_a_limit_of_file_sizes_is_said(tmp_path):
    tensors, specs = tiny_model()
    source = save_model(tmp_path / "source", tensors)

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        convert(open_checkpoint(source), specs, tmp_path / "out", policy=MIXED)

    killed, said = in_child(run)
    assert not killed and said.startswith("OutOfBudget: "), said
    assert "is larger than files may be here (ulimit -f" in said
    with open_checkpoint(source) as checkpoint:
        convert(checkpoint, specs, tmp_path / "out", policy=MIXED)
    open_checkpoint(tmp_path / "out").verify()


@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_a_disk_that_fails_late_is_noticed(tmp_path, monkeypatch, call):
    """Systems that place bytes late say only then that there was no room."""
    monkeypatch.setattr("moestro.memory.write_behind.STEP_NBYTES", 4096)
    tensors, specs = tiny_model()
    source = open_checkpoint(save_model(tmp_path / "source", tensors))
    real, calls = getattr(os, call), []

    def full(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 7:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd)

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OutOfBudget, match="the disk is full"):
        convert(source, specs, tmp_path / "out", policy=MIXED)
    monkeypatch.setattr(os, call, real)
    convert(source, specs, tmp_path / "out", policy=MIXED)
    open_checkpoint(tmp_path / "out").verify()
    assert len(calls) >= 7
