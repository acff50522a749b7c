"""Owns safetensors checkpoints: a single file, or shards under an index, with config.json beside.

Layout of a file (safetensors format): header length u64, that many bytes of JSON (name -> dtype,
shape, data_offsets), data. The data must be covered by the tensors exactly: no overlap, no hole.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moestro.checkpoints.base import TensorInfo
from moestro.checkpoints.files import (
    MAX_JSON_NBYTES,
    ByteSource,
    SourceFile,
    parse_json,
    read_json,
    show,
)
from moestro.checkpoints.quant_configs import read_quantization
from moestro.checkpoints.quantized import find_weights, refuse_undeclared
from moestro.checkpoints.table import TensorTable, check_disjoint
from moestro.core.errors import CheckpointError, UnsupportedFormat

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
INDEX_SUFFIX = ".safetensors.index.json"

#: Bits per element of every dtype of the format (safetensors 0.8).
DTYPE_BITS: dict[str, int] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F16": 16, "BF16": 16, "U16": 16, "I16": 16,
    "F32": 32, "U32": 32, "I32": 32,
    "F64": 64, "U64": 64, "I64": 64, "C64": 64,
}  # fmt: skip
_MAX_DIMS = 64


class SafetensorsCheckpoint(TensorTable):
    """A Hugging Face checkpoint. ``config`` is config.json, empty when there is none.

    A weight that is stored quantized in several tensors has one QuantizedInfo, under the name that
    the weight has in a float checkpoint; the tensors themselves are there too.
    """

    container = "safetensors"

    @classmethod
    def open(cls, path: Path) -> SafetensorsCheckpoint:
        """Open a directory, a .safetensors file or a .safetensors.index.json file.

        Raises CheckpointError for missing shards and anything corrupt or inconsistent, and
        UnsupportedFormat for weights that config.json declares quantized in a way not read.
        """
        directory = path if path.is_dir() else path.parent
        config: dict[str, Any] = {}
        quantization = None
        config_path = directory / "config.json"
        if os.path.exists(config_path):
            config = read_json(config_path)
            quantization = read_quantization(config, str(config_path))
        if path.is_dir():
            # The order of transformers: a whole file is preferred to an index.
            single = path / SINGLE_NAME
            target = single if os.path.lexists(single) else path / INDEX_NAME
        else:
            target = path
        files: dict[Path, SourceFile] = {}
        try:
            if target.name.endswith(INDEX_SUFFIX):
                infos = _open_shards(target, files)
            else:
                infos = _open_file(target, files)
            if quantization is None:
                refuse_undeclared(infos, str(path))
            else:
                infos |= find_weights(
                    quantization,
                    infos,
                    lambda info: files[info.file].read_tensor(info.offset, info.nbytes),
                )
        except BaseException:
            for file in files.values():
                file.close()
            raise
        return cls(path, config, infos, files.values())

    @property
    def architecture(self) -> str:
        """``model_type``. Raises CheckpointError if there is no config.json that says."""
        value = self.config.get("model_type")
        if not isinstance(value, str) or not value:
            directory = self.path if self.path.is_dir() else self.path.parent
            state = "does not name a model_type" if self.config else "is missing or empty"
            raise CheckpointError(
                f"{directory / 'config.json'} {state}, so the model family is unknown; fetch the "
                "config.json that belongs to these weights"
            )
        return value


def _open_file(path: Path, files: dict[Path, SourceFile]) -> dict[str, TensorInfo]:
    files[path] = SourceFile(path)
    return parse_header(files[path])


def _open_shards(index: Path, files: dict[Path, SourceFile]) -> dict[str, TensorInfo]:
    """The tensors an index names, shard by shard in disk order. The index is the authority: what
    a shard holds beyond it is not part of the checkpoint."""
    wanted: dict[str, set[str]] = {}
    for name, shard in read_index(index).items():
        wanted.setdefault(shard, set()).add(name)
    missing = sorted(shard for shard in wanted if not os.path.exists(index.parent / shard))
    if missing:
        listed = ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "")
        raise CheckpointError(
            f"{index} names {len(wanted)} shards, {len(missing)} of which are missing: {listed}; "
            "finish the download"
        )
    infos: dict[str, TensorInfo] = {}
    for shard in sorted(wanted):
        found = _open_file(index.parent / shard, files)
        absent = sorted(wanted[shard] - found.keys())
        if absent:
            raise CheckpointError(
                f"{index} places {len(absent)} tensors in {shard} that are not there, the first is "
                f"{show(absent[0])}; index and shards are of different versions, fetch both again"
            )
        infos.update((name, info) for name, info in found.items() if name in wanted[shard])
    return infos


def read_index(path: Path) -> dict[str, str]:
    """The ``weight_map`` of an index file: tensor name -> shard file name in the same directory.

    Raises CheckpointError if it is malformed or a shard name points out of the directory.
    """
    weight_map = read_json(path, strict=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map; fetch the index again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CheckpointError(f"{path}: the shard of {show(name)} is {show(shard)}, not a name")
        if shard in ("", ".", "..") or any(c in shard for c in "/\\\0"):
            raise CheckpointError(
                f"{path}: the shard of {show(name)} is {show(shard)}; shards must be plain file "
                "names beside the index"
            )
    return weight_map


def parse_header(source: ByteSource) -> dict[str, TensorInfo]:
    """Parse and check the header of one safetensors file; tensors in disk order.

    Raises CheckpointError when anything in it is malformed, out of range, overlapping or leaves
    bytes of the file uncovered, and UnsupportedFormat for a dtype that the format does not have.
    """
    path = source.path
    if source.size < 8:
        raise CheckpointError(
            f"{path} has {source.size} bytes, too few for a safetensors file; fetch it again"
        )
    length = int.from_bytes(source.pread(0, 8), "little")
    if length > min(source.size - 8, MAX_JSON_NBYTES):
        raise CheckpointError(
            f"{path} declares a header of {length} bytes, but has {source.size} bytes (and headers "
            f"end at {MAX_JSON_NBYTES}); it is truncated or not a safetensors file"
        )
    raw = source.pread(8, length)
    if not raw.startswith(b"{"):
        raise CheckpointError(f"{path} is not a safetensors file: its header is not a JSON object")
    header = parse_json(raw, f"{path}: the header")
    _check_metadata(header.pop("__metadata__", None), path)
    start = 8 + length
    infos = [_info(name, entry, start, source) for name, entry in header.items()]
    check_disjoint(infos, path)
    # Disjoint and within the data: then covering it is a matter of counting.
    covered = sum(info.nbytes for info in infos)
    if covered != source.size - start:
        raise CheckpointError(
            f"{path}: the tensors cover {covered} of {source.size - start} data bytes; the file is "
            "corrupt, fetch it again"
        )
    return {info.name: info for info in sorted(infos, key=lambda info: info.offset)}


def _check_metadata(metadata: Any, path: Path) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(
            f"{path}: __metadata__ is not a map from strings to strings; the header is corrupt"
        )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_text(name: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in name)


def _info(name: str, entry: Any, start: int, source: ByteSource) -> TensorInfo:
    what = f"{source.path}: tensor {show(name)}"
    if not _is_text(name):  # JSON escapes can spell halves of characters
        raise CheckpointError(f"{what} has a name that is not Unicode text; the header is corrupt")
    if not isinstance(entry, Mapping) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(
            f"{what} does not declare dtype, shape and data_offsets; the header is corrupt"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise UnsupportedFormat(
            f"{what} has dtype {show(dtype)}, which is not known here; known: "
            f"{', '.join(DTYPE_BITS)}"
        )
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(map(_is_count, shape)):
        raise CheckpointError(f"{what} has the shape {show(shape)}; the header is corrupt")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise CheckpointError(
            f"{what} has data_offsets {show(offsets)}, not [begin, end]; the header is corrupt"
        )
    begin, end = offsets
    if not begin <= end <= source.size - start:
        raise CheckpointError(
            f"{what} takes data bytes {begin} to {end}, but the file has {source.size - start}; it "
            "is truncated or corrupt, fetch it again"
        )
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (end - begin):
        raise CheckpointError(
            f"{what} {show(shape)} of {dtype} needs {show(-(-bits // 8))} bytes, but its "
            f"data_offsets give {end - begin}; the header is corrupt"
        )
    return TensorInfo(
        name=name,
        shape=tuple(shape),
        dtype=dtype,
        file=source.path,
        offset=start + begin,
        nbytes=end - begin,
    )
