"""Owns how checkpoint files are read: positioned reads of checked ranges, never through mmap, and
JSON that was written by strangers. Every failure is a CheckpointError that names the file.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
import weakref
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from moestro.core.errors import CheckpointError
from moestro.core.units import format_bytes

# One preadv moves at most 2 GiB - 4 KiB on Linux; smaller steps keep reads interruptible.
_READ_STEP = 1 << 28
_DROP_ALL = 1 << 26
# json.loads turns n bytes into at most some 30 n bytes of objects; the safetensors format has the
# same bound on its header.
MAX_JSON_NBYTES = 100_000_000


class ByteSource(Protocol):
    """What header parsers read from: a file, or bytes in memory."""

    @property
    def path(self) -> Path: ...
    @property
    def size(self) -> int: ...
    def pread(self, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes at ``offset``. The caller has checked them against ``size``."""
        ...


class SourceFile:
    """A regular file opened for positioned reads (safe from several threads)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            mode = path.stat().st_mode
            if not stat.S_ISREG(mode):  # opening a pipe would block
                raise CheckpointError(f"{path} is not a regular file")
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            gone = "links to a file that does not exist" if path.is_symlink() else "does not exist"
            raise CheckpointError(f"{path} {gone}") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
        self._close = weakref.finalize(self, os.close, self._fd)
        self.size = os.fstat(self._fd).st_size
        self._once, self._undropped = False, 0

    def read_once(self, *, in_order: bool = False) -> None:
        """From now on let what was read leave the page cache. in_order: it will be read from its
        start to its end; else the system is asked not to read ahead of what is wanted.
        """
        self._once = True
        if not in_order:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    def pread(self, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes at ``offset``; raises as ``read_tensor`` does."""
        return self.read_tensor(offset, nbytes).numpy().tobytes()

    def read_tensor(self, offset: int, nbytes: int) -> Tensor:
        """The bytes [offset, offset + nbytes) as a fresh uint8 tensor [nbytes].

        Raises CheckpointError when the range is not in the file, when the file is closed, or when
        the disk fails.
        """
        self._require(offset, nbytes)
        out = torch.empty(nbytes, dtype=torch.uint8)
        self.read_into(offset, out)
        return out

    def read_into(self, offset: int, out: Tensor) -> None:
        """Fill ``out`` (uint8, 1-D, contiguous) with the bytes from ``offset`` on; raises as
        ``read_tensor`` does.
        """
        nbytes = out.numel()
        self._require(offset, nbytes)
        view = memoryview(out.numpy())  # type: ignore[arg-type]  # numpy's buffer is untyped before 3.12
        done = 0
        while done < nbytes:
            step = view[done : done + _READ_STEP]
            try:
                got = os.preadv(self._fd, [step], offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path}: reading {len(step)} bytes at {offset + done} failed: "
                    f"{error.strerror}"
                ) from error
            if got == 0:
                raise CheckpointError(
                    f"{self.path} ends at byte {offset + done}, {nbytes - done} bytes before the "
                    "end of a tensor: it was changed or cut while open; fetch it again"
                )
            done += got
        if self._once:
            self._drop(offset, nbytes)

    def _drop(self, offset: int, nbytes: int) -> None:
        """Let a range leave the page cache, and now and then all there is: the system keeps pages
        in groups that may reach over both ends, and drops only whole ones.
        """
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        stop = -(-(offset + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.posix_fadvise(self._fd, start, stop - start, os.POSIX_FADV_DONTNEED)
        self._undropped += nbytes  # threads may lose a sum, which does no harm
        if self._undropped >= _DROP_ALL:
            self._undropped = 0
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _require(self, offset: int, nbytes: int) -> None:
        """The file is open and has these bytes; checked before memory is taken for them."""
        if not self._close.alive:
            raise CheckpointError(f"{self.path} has been closed; open the checkpoint again")
        if offset < 0 or nbytes < 0 or nbytes > self.size - offset:
            raise CheckpointError(
                f"{self.path}: bytes {offset} to {offset + nbytes} are not in a file of "
                f"{self.size} bytes"
            )

    def close(self) -> None:
        """Close the file; reading from it is an error from then on. May be called twice."""
        if self._once and self._close.alive:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._close()


def show(value: object) -> str:
    """A value out of a file as it appears in a message: quoted, escaped, of bounded length."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 160 else f"{text[:120]}... ({len(text)} characters)"


def _pairs_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {show(twice)} occurs twice")
    return out


def _short_int(digits: str) -> int:
    # int() takes quadratic time, and no count or offset has more digits than 2**64.
    if len(digits) > 20:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def parse_json(data: bytes, what: str, *, strict: bool = True) -> dict[str, Any]:
    """Parse a JSON object from UTF-8 bytes. ``what`` begins the messages.

    ``strict`` also refuses duplicate keys, numbers beyond 20 digits, NaN and Infinity; it is for
    formats of our own concern. config.json files in circulation do hold Infinity.
    """
    hooks: dict[str, Any] = {"parse_int": _short_int}
    if strict:
        hooks["object_pairs_hook"] = _pairs_without_duplicates
        hooks["parse_constant"] = _no_constant
    try:
        value = json.loads(data.decode("utf-8"), **hooks)
    except RecursionError:
        raise CheckpointError(f"{what} is not usable JSON: nested too deeply") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise CheckpointError(f"{what} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} holds a JSON {type(value).__name__}, not an object")
    return value


def read_json(path: Path, *, strict: bool = False) -> dict[str, Any]:
    """Read a JSON object from a file of at most 100 MB. Raises CheckpointError."""
    source = SourceFile(path)
    try:
        if source.size > MAX_JSON_NBYTES:
            raise CheckpointError(
                f"{path} has {format_bytes(source.size)}; a JSON file of a checkpoint has at most "
                "100 MB"
            )
        return parse_json(source.pread(0, source.size), str(path), strict=strict)
    finally:
        source.close()
