"""A small packed directory written by hand from the description of moestro.json."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

BLOB = 4096
EXPERTS = b"".join(bytes([e]) * BLOB for e in (1, 2, 3))
MATRIX = bytes(range(256)) + bytes(32)  # int4-g32 [16, 32] is 288 bytes
VECTOR = bytes(16 * 4)


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def shared_file() -> bytes:
    header = {
        "norm": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]},
        "q": {"dtype": "U8", "shape": [288], "data_offsets": [64, 352]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text + VECTOR + MATRIX


def manifest(files: dict[str, bytes]) -> dict[str, Any]:
    start = len(files["shared.safetensors"]) - 352
    parts = [
        {"format": "int4-g32", "rows": 16, "cols": 32, "offset": 0},
        {"format": "int4-g32", "rows": 16, "cols": 32, "offset": 320},
        {"format": "int4-g32", "rows": 32, "cols": 16, "offset": 640},
    ]
    return {
        "format_version": 1,
        "architecture": "tiny",
        "config_container": "safetensors",
        "source": {"name": "somewhere"},
        "fingerprint": "f00d",
        "files": {n: {"nbytes": len(d), "digest": digest(d)} for n, d in files.items()},
        "weights": {
            "norm": {
                "kind": "vector",
                "shape": [16],
                "file": "shared.safetensors",
                "offset": start,
                "nbytes": 64,
                "relative_error": 0.0,
            },
            "q": {
                "kind": "matrix",
                "format": "int4-g32",
                "shape": [16, 32],
                "file": "shared.safetensors",
                "offset": start + 64,
                "nbytes": 288,
                "relative_error": 0.08,
            },
            "layers.0.experts": {
                "kind": "experts",
                "shape": [3, 16, 32],
                "file": "experts-000.bin",
                "offset": 0,
                "nbytes": 3 * BLOB,
                "blob_nbytes": BLOB,
                "parts": parts,
                "relative_error": 0.08,
            },
        },
    }


def files() -> dict[str, bytes]:
    return {
        "config.json": b'{"model_type": "tiny", "limit": Infinity}',
        "shared.safetensors": shared_file(),
        "experts-000.bin": EXPERTS,
    }


def write(directory: Path, body: Any = None, contents: dict[str, bytes] | None = None) -> Path:
    contents = contents or files()
    directory.mkdir(exist_ok=True)
    for name, data in contents.items():
        (directory / name).write_bytes(data)
    body = manifest(contents) if body is None else body
    text = body if isinstance(body, str) else json.dumps(body)
    (directory / "moestro.json").write_text(text)
    return directory
