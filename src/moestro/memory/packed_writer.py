"""Writes the files of a packed model so that a kill at any moment loses at most one file's work.

All work happens in ``OUT.partial`` beside OUT. A file is written under a temporary name, synced,
read back against its checksum, renamed, and only then entered in the journal. When all are there
moestro.json follows, and the directory is renamed to OUT: OUT never exists half-done.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from torch import Tensor

from moestro.checkpoints.files import read_json
from moestro.checkpoints.packed import (
    MANIFEST_NAME,
    PackedFile,
    file_digest,
    new_digest,
    read_manifest,
)
from moestro.core.errors import CheckpointError, InvalidRequest, OutOfBudget
from moestro.core.units import format_bytes
from moestro.memory.write_behind import WriteBehind

JOURNAL_NAME = "journal.json"
_TEMPORARY = ".tmp"
#: disk space asked for beyond the weights: config, tokenizer, manifest, file system overhead
_SLACK_NBYTES = 64 << 20

#: what a weight file's producer gets: call it with bytes, in order
Sink = Callable[[Tensor | bytes], None]


class PackedWriter:
    """One conversion into ``out_dir``; use as a context manager, which holds a lock.

    ``fingerprint`` identifies source and settings: unfinished work with another one is refused.
    """

    def __init__(self, out_dir: Path, fingerprint: str) -> None:
        self.out_dir = out_dir.resolve()
        self.work_dir = self.out_dir.with_name(self.out_dir.name + ".partial")
        self.fingerprint = fingerprint
        self.files: dict[str, PackedFile] = {}
        #: what each finished file's producer returned, kept over restarts
        self.notes: dict[str, Any] = {}
        self._lock = -1

    def already_done(self) -> bool:
        """True if OUT holds this very conversion. Raises InvalidRequest if OUT is anything else
        than absent, empty or that.
        """
        out = self.out_dir
        if not os.path.lexists(out):
            return False
        if not out.is_dir():
            raise InvalidRequest(f"{out} exists and is not a directory; choose another name")
        if os.path.ismount(out):
            raise InvalidRequest(f"{out} is a mount point; give a new directory inside it")
        if (out / MANIFEST_NAME).exists():
            try:
                same = read_manifest(out).fingerprint == self.fingerprint
            except CheckpointError:
                same = False
            if same:
                return True
            raise InvalidRequest(
                f"{out} holds another packed model; choose another name, or delete it first"
            )
        if any(out.iterdir()):
            raise InvalidRequest(f"{out} is not empty and not a packed model; choose another name")
        return False

    def __enter__(self) -> PackedWriter:
        try:
            self.work_dir.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.work_dir, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self._refuse(self.work_dir, error)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._unlock()
            raise InvalidRequest(f"another conversion into {self.out_dir} is running") from None
        except OSError:
            pass  # a file system without locks; then two conversions at once are up to the user
        try:
            self._resume()
        except BaseException as error:
            self._unlock()
            if isinstance(error, OSError):
                self._refuse(self.work_dir / JOURNAL_NAME, error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def discard(self) -> None:
        """Remove everything written so far: the source cannot be converted at all."""
        shutil.rmtree(self.work_dir, ignore_errors=True)

    def require_space(self, nbytes: int) -> None:
        """Raise OutOfBudget unless the disk has room for ``nbytes`` more."""
        free = shutil.disk_usage(self.work_dir).free
        if free < nbytes + _SLACK_NBYTES:
            raise OutOfBudget(
                f"{format_bytes(nbytes + _SLACK_NBYTES)} are needed in {self.out_dir.parent}, "
                f"{format_bytes(free)} are free; free some space or choose a smaller format"
            )

    def write(self, name: str, produce: Callable[[Sink], Any]) -> Any:
        """Write one file by ``produce(sink)``; its JSON-able result is kept in the journal.

        A file that the journal already has is not produced again. Raises OutOfBudget when the disk
        is full, InvalidRequest when it cannot be written, CheckpointError when it reads back
        differently.
        """
        if name in self.files:
            return self.notes[name]
        path, temporary = self.work_dir / name, self.work_dir / (name + _TEMPORARY)
        digest = new_digest()
        try:
            with WriteBehind(temporary) as file:

                def sink(data: Tensor | bytes) -> None:
                    view = memoryview(data) if isinstance(data, bytes) else data.numpy().data
                    digest.update(view)
                    file.write(view)

                note = produce(sink)
                file.finish()  # so that the check reads the disk, not the cache
            written = PackedFile(nbytes=file.nbytes, digest=digest.hexdigest())
            if file_digest(temporary, once=True) != written.digest:
                raise CheckpointError(
                    f"{temporary} reads back differently than it was written; the disk is failing"
                )
            os.replace(temporary, path)
        except OSError as error:
            self._refuse(temporary, error)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._record(name, written, note)
        return note

    def write_produced(self, produce: Callable[[Path], object]) -> None:
        """Write the files that ``produce(directory)`` leaves in the scratch directory it is given.

        Names that are written already keep their first content.
        """
        try:
            scratch = Path(tempfile.mkdtemp(dir=self.work_dir))
        except OSError as error:
            self._refuse(self.work_dir, error)
        try:
            produce(scratch)
            for path in sorted(path for path in scratch.iterdir() if path.is_file()):
                data = path.read_bytes()
                self.write(path.name, lambda sink, data=data: sink(data))  # type: ignore[misc]
        except OSError as error:
            self._refuse(scratch, error)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Write moestro.json, drop the journal, and give the directory its name."""
        body = dict(manifest)
        body["fingerprint"] = self.fingerprint
        body["files"] = {name: asdict(self.files[name]) for name in sorted(self.files)}
        try:
            self._put_json(MANIFEST_NAME, body)
            (self.work_dir / JOURNAL_NAME).unlink(missing_ok=True)
            self._publish()
        except OSError as error:
            self._refuse(self.work_dir / (MANIFEST_NAME + _TEMPORARY), error)

    def _publish(self) -> None:
        os.fsync(self._lock)
        os.rename(self.work_dir, self.out_dir)  # onto nothing, or onto an empty directory
        _sync_directory(self.out_dir.parent)

    def _resume(self) -> None:
        """Take up what an interrupted run left. Raises InvalidRequest if it was another one."""
        journal = self.work_dir / JOURNAL_NAME
        if (self.work_dir / MANIFEST_NAME).exists() and not journal.exists():
            # Killed between its last file and the rename.
            self._require_same(read_manifest(self.work_dir).fingerprint)
            self._publish()
            return
        if not journal.exists():
            if {path.name for path in self.work_dir.iterdir()} - {JOURNAL_NAME + _TEMPORARY}:
                raise InvalidRequest(
                    f"{self.work_dir} is in the way and is no unfinished conversion; move it"
                )
            self._put_json(JOURNAL_NAME, {"fingerprint": self.fingerprint, "files": {}})
            return
        raw = read_json(journal)
        self._require_same(str(raw.get("fingerprint")))
        for name, entry in raw["files"].items():
            path = self.work_dir / name
            if path.is_file() and path.stat().st_size == entry["nbytes"]:
                self.files[name] = PackedFile(nbytes=entry["nbytes"], digest=entry["digest"])
                self.notes[name] = entry["note"]
        for path in self.work_dir.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in self.files and path.name != JOURNAL_NAME:
                path.unlink()

    def _require_same(self, fingerprint: str) -> None:
        if fingerprint != self.fingerprint:
            raise InvalidRequest(
                f"{self.work_dir} holds an unfinished conversion of another model or with other "
                "formats; finish that one, or delete the directory"
            )

    def _record(self, name: str, file: PackedFile, note: Any) -> None:
        self.files[name] = file
        self.notes[name] = note
        entries = {n: {**asdict(f), "note": self.notes[n]} for n, f in self.files.items()}
        try:
            self._put_json(JOURNAL_NAME, {"fingerprint": self.fingerprint, "files": entries})
        except OSError as error:
            self._refuse(self.work_dir / (JOURNAL_NAME + _TEMPORARY), error)

    def _put_json(self, name: str, value: Any) -> None:
        temporary = self.work_dir / (name + _TEMPORARY)
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.work_dir / name)
        os.fsync(self._lock)

    def _refuse(self, temporary: Path, error: OSError) -> NoReturn:
        if temporary.is_file():
            temporary.unlink()
        again = "run the same command again, it continues where it stopped"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfBudget(
                f"the disk is full at {temporary}; free some space and {again}"
            ) from error
        if error.errno == errno.EFBIG:
            raise OutOfBudget(
                f"{temporary} is larger than files may be here (ulimit -f, or the file system); "
                f"raise that limit and {again}"
            ) from error
        raise InvalidRequest(
            f"{temporary} cannot be written: {error.strerror}; when it can, {again}"
        ) from error


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
