"""Owns hub ids: which files of a repository are needed, and fetching them into the hub cache.

All access goes through huggingface_hub, whose cache, resume, tokens and HF_* settings apply. This
file is imported only for a hub id: huggingface_hub takes a third of a second to import.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import huggingface_hub.errors as hub_errors
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from moestro.checkpoints.gguf import first_parts, split_paths
from moestro.checkpoints.packed import MANIFEST_NAME
from moestro.checkpoints.safetensors import INDEX_NAME, SINGLE_NAME, read_index
from moestro.core.errors import CheckpointError, InvalidRequest

T = TypeVar("T")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[^:]+)?", re.ASCII)
_FILE_SUFFIXES = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".pth")
# The manifest and config come with the small files.
_PACKED_FILES = ["*.safetensors", "experts-*.bin"]
# What a model needs beside its weights, at the top of the repository.
_SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt", "*.tiktoken"]
_SUBFOLDERS = ["*/*"]
# The bases of HfHubHTTPError are OSError and the HTTP library's own error; taking them from it
# holds for versions on requests and on httpx alike, whose transport errors are not all OSErrors.
_FAILURES: tuple[type[Exception], ...] = (
    EntryNotFoundError,
    OSError,
    HFValidationError,
    *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)),
    getattr(hub_errors, "XetDownloadError", OSError),  # since 1.0
)


def is_hub_id(text: str) -> bool:
    """Whether text has the form ``owner/name`` or ``owner/name:file.gguf``, and not of a file."""
    match = _HUB_ID.fullmatch(text)
    return match is not None and (match[1] is not None or not text.endswith(_FILE_SUFFIXES))


def fetch(hub_id: str, *, revision: str | None = None, offline: bool = False) -> Path:
    """Bring what a hub id names into the local cache; returns the directory or the .gguf file.

    Only what is needed is fetched: configuration, tokenizer and the shards its index names, or one
    GGUF model. A repository that holds a single GGUF model and no safetensors is that model. All
    files are of one commit. Raises CheckpointError with the way out for anything that fails.
    """
    repo, _, filename = hub_id.partition(":")
    repository = _Repository(repo, revision, offline)
    if filename:
        if not filename.endswith(".gguf"):
            raise InvalidRequest(
                f"{hub_id}: only .gguf files can be chosen from a repository; give {repo} to open "
                "its safetensors"
            )
        return repository.gguf(filename)
    directory = repository.snapshot(_SMALL_FILES)
    # From here on by commit: a branch that moves meanwhile must not mix two versions.
    repository.revision = directory.name
    if (directory / MANIFEST_NAME).exists():
        return repository.snapshot(_PACKED_FILES)
    if (directory / INDEX_NAME).exists():
        return repository.snapshot(sorted(set(read_index(directory / INDEX_NAME).values())))
    single = repository.optional(SINGLE_NAME)
    if single is not None:
        return single.parent
    return _only_gguf(repository, directory)


def _only_gguf(repository: _Repository, directory: Path) -> Path:
    found = first_parts(repository.list_files(directory))
    if len(found) == 1:
        return repository.gguf(found[0])
    if found:
        raise CheckpointError(
            f"{repository.name} holds {len(found)} GGUF models; open one of them: "
            + ", ".join(f"{repository.name}:{name}" for name in found[:12])
            + (" ..." if len(found) > 12 else "")
        )
    where = "what the local cache has of it" if repository.offline else "it"
    raise CheckpointError(
        f"{repository.name} at {repository.revision}: {where} holds neither {SINGLE_NAME}, "
        f"{INDEX_NAME} nor a .gguf file"
        + ("; fetch it once without offline mode" if repository.offline else "")
    )


class _Repository:
    """One repository at one revision; every call turns hub errors into CheckpointErrors."""

    def __init__(self, name: str, revision: str | None, offline: bool) -> None:
        self.name = name
        self.revision = revision
        self.offline = offline

    def snapshot(self, patterns: list[str]) -> Path:
        """Fetch the top-level files that match; returns the directory of the snapshot."""
        return Path(
            self._do(
                lambda: snapshot_download(
                    self.name,
                    revision=self.revision,
                    allow_patterns=patterns,
                    ignore_patterns=_SUBFOLDERS,
                    local_files_only=self.offline,
                ),
                "its files",
            )
        )

    def gguf(self, filename: str) -> Path:
        """Fetch a GGUF file, or all parts of a split one; returns the path of ``filename``."""
        for part in split_paths(Path(filename)) or []:
            self._file(part.as_posix())
        return self._file(filename)

    def optional(self, filename: str) -> Path | None:
        """Fetch a file that may be absent (offline: from the repository or the cache)."""
        try:
            return Path(self._download(filename))
        except LocalEntryNotFoundError as error:
            if self.offline:
                return None
            raise self._error(error, filename) from error
        except EntryNotFoundError:
            return None
        except _FAILURES as error:
            raise self._error(error, filename) from error

    def list_files(self, directory: Path) -> list[str]:
        """The files of the repository; offline, those of its cached ``directory``."""
        if self.offline:
            files = (Path(top, f) for top, _, names in os.walk(directory) for f in names)
            return [file.relative_to(directory).as_posix() for file in files]
        return self._do(
            lambda: HfApi().list_repo_files(self.name, revision=self.revision), "its list of files"
        )

    def _download(self, filename: str) -> str:
        return hf_hub_download(
            self.name, filename, revision=self.revision, local_files_only=self.offline
        )

    def _file(self, filename: str) -> Path:
        return Path(self._do(lambda: self._download(filename), filename))

    def _do(self, action: Callable[[], T], what: str) -> T:
        try:
            return action()
        except _FAILURES as error:
            raise self._error(error, what) from error

    def _error(self, error: Exception, what: str) -> CheckpointError:
        """The CheckpointError for a hub error, with the way out. Order: subclasses first."""
        page = f"https://huggingface.co/{self.name}"
        at = f"{self.name} at {self.revision}" if self.revision else self.name
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, GatedRepoError):
            text = f"needs its terms accepted at {page}, then a login: hf auth login, or HF_TOKEN"
        elif isinstance(error, RepositoryNotFoundError):
            text = (
                "is neither a path on disk nor a repository of the hub that you can see; check the "
                "spelling, or log in if it is private: hf auth login, or HF_TOKEN"
            )
        elif isinstance(error, RevisionNotFoundError):
            text = f"has no such revision; see {page}/commits"
        elif isinstance(error, LocalEntryNotFoundError) and self.offline:
            text = (
                f"is not on disk, and the local hub cache does not have {what}; fetch it once "
                "without offline mode (offline=True, HF_HUB_OFFLINE)"
            )
        elif isinstance(error, LocalEntryNotFoundError):
            text = (
                f"is not on disk, and {what} can be had neither from the hub nor from the local "
                f"cache: {reason}; check the network, or give the path of a copy"
            )
        elif isinstance(error, EntryNotFoundError):
            text = f"has no file {what}; see {page}/tree/{self.revision or 'main'}"
        elif isinstance(error, HFValidationError):
            text = f"is neither a path on disk nor a valid hub id: {reason}"
        else:
            text = f"could not be fetched ({what}): {type(error).__name__}: {reason}; try again"
        return CheckpointError(f"{at} {text}")
