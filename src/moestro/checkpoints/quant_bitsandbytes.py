"""Owns what bitsandbytes stores beside 4-bit weights: a JSON text in a tensor, and block scales.

Layout (bitsandbytes, ``QuantState.as_dict(packed=True)``): ``weight`` holds two codes per byte of
the flattened matrix, first in the high bits; ``quant_map`` the sixteen numbers they stand for;
``absmax`` a scale per block of consecutive weights. With double quantization ``absmax`` holds bytes
that stand for ``nested_quant_map[byte] * nested_absmax[block] + nested_offset``.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moestro.checkpoints.files import show
from moestro.core.errors import CheckpointError

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class State:
    """shape: [N, K]. block: weights per scale. nested_block: of those per scale of scales, or 0."""

    shape: tuple[int, int]
    block: int
    nested_block: int
    nested_offset: float

    @property
    def blocks(self) -> int:
        return -(-self.shape[0] * self.shape[1] // self.block)


def read_state(name: str, raw: _Bytes) -> State:
    """The state in the tensor ``name``. Raises CheckpointError if it is none."""

    def fail(what: str) -> CheckpointError:
        return CheckpointError(f"{name}: {what}; the checkpoint is corrupt")

    try:
        found = json.loads(raw.tobytes())
    except ValueError as error:
        raise fail(f"not a JSON text ({error})") from None
    if not isinstance(found, dict):
        raise fail(f"{show(found)} is not an object")

    def count(key: str, value: object, least: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise fail(f"{key} is {show(value)}, not a count")
        return value

    shape = found.get("shape")
    if not isinstance(shape, list) or len(shape) != 2:
        raise fail(f"shape is {show(shape)}, not [rows, columns]")
    offset = found.get("nested_offset", 0.0)
    if not isinstance(offset, int | float) or not math.isfinite(offset):
        raise fail(f"nested_offset is {show(offset)}, not a number")
    return State(
        shape=(count("shape", shape[0], 1), count("shape", shape[1], 1)),
        block=count("blocksize", found.get("blocksize"), 1),
        nested_block=count("nested_blocksize", found.get("nested_blocksize", 0), 0),
        nested_offset=float(offset),
    )


def unnested(state: State, stored: _Bytes, scales: _Floats, numbers: _Floats) -> _Floats:
    """float32 scales of double-quantized ones, rounded after each operation."""
    group = np.arange(stored.size) // state.nested_block
    return numbers[stored] * scales[group] + np.float32(state.nested_offset)


def unpack(raw: _Bytes, shape: tuple[int, int]) -> _Bytes:
    """uint8 codes [N, K]."""
    codes = np.stack([raw >> 4, raw & np.uint8(15)], axis=-1).reshape(-1)
    return codes[: shape[0] * shape[1]].reshape(shape)
