"""Which weight formats the kernels here read, and how: one descriptor per format.

A descriptor is a compile-time constant of a kernel, which calls its decoder: a new format is a row
here and, if its tiles are new, a decoder in ``kernels/decode.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from moestro import formats
from moestro.core.errors import UnsupportedFormat
from moestro.devices.cuda.kernels import decode

BLOCK = 32


@dataclass(frozen=True, kw_only=True, repr=False)
class TileFormat:
    """How a kernel reads tiles (see ``csrc/formats/layouts.h`` for their bytes).

    name: with the group. header, block: bytes of a tile's header and of a block of 32 input
    channels. tile_blocks, tile_nbytes: blocks and bytes of a tile. steps: scales per block. zero:
    what is subtracted from each code; shift: what makes it a signed byte, the same by default.
    codes, scales, minima: decoders of integer formats, without minima None; elements, tile_scale:
    of float formats, without scales None.
    """

    name: str = ""
    header: int
    block: int
    tile_blocks: int = 0
    tile_nbytes: int = 0
    steps: int = 1
    zero: int = 0
    shift: int | None = None
    codes: Any = None
    scales: Any = None
    minima: Any = None
    elements: Any = None
    tile_scale: Any = None
    is_float: bool = field(init=False)
    has_min: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shift", self.zero if self.shift is None else self.shift)
        object.__setattr__(self, "is_float", self.elements is not None)
        object.__setattr__(self, "has_min", self.minima is not None)

    @property
    def cache_key(self) -> str:
        """What compiled kernels of this format are kept under: its facts and its decoders."""
        parts = (self.codes, self.scales, self.minima, self.elements, self.tile_scale)
        sources = [str(getattr(part, "cache_key", part)) for part in parts if part is not None]
        facts = (self.name, self.header, self.block, self.tile_blocks, self.tile_nbytes, self.steps)
        return ":".join([*map(str, facts), f"{self.zero}:{self.shift}", *sources])

    def __repr__(self) -> str:
        return f"TileFormat({self.cache_key})"


_NIBBLES, _FIVE_BITS, _PAIRS = 256, 320, 128
_K4 = {"scales": decode.byte_steps, "minima": decode.byte_minima, "header": 320, "tile_blocks": 8}

#: by name without the group
_STEMS: dict[str, TileFormat] = {
    "int8": TileFormat(
        header=32, block=512, zero=128, codes=decode.byte_codes, scales=decode.half_steps
    ),
    "int8z": TileFormat(
        header=48, block=512, shift=128, codes=decode.byte_codes, scales=decode.half_steps,
        minima=decode.zero_point_minima,
    ),
    "int4": TileFormat(
        header=32, block=_NIBBLES, zero=8, codes=decode.nibble_codes, scales=decode.half_steps
    ),
    "int4z": TileFormat(
        header=48, block=_NIBBLES, codes=decode.nibble_codes, scales=decode.half_steps,
        minima=decode.zero_point_minima,
    ),
    "int4m": TileFormat(
        header=64, block=_NIBBLES, codes=decode.nibble_codes, scales=decode.half_steps,
        minima=decode.half_minima,
    ),
    "int5": TileFormat(
        header=32, block=_FIVE_BITS, zero=16, codes=decode.five_bit_codes,
        scales=decode.half_steps,
    ),
    "int5m": TileFormat(
        header=64, block=_FIVE_BITS, codes=decode.five_bit_codes, scales=decode.half_steps,
        minima=decode.half_minima,
    ),
    "lut4nl": TileFormat(
        header=32, block=_NIBBLES, zero=128, codes=decode.nl_codes, scales=decode.half_steps
    ),
    "mxfp4": TileFormat(
        header=16, block=_NIBBLES, tile_blocks=1, zero=12, codes=decode.e2m1_codes,
        scales=decode.e8m0_steps,
    ),
    "nvfp4": TileFormat(
        header=64, block=_NIBBLES, tile_blocks=2, steps=2, zero=12, codes=decode.e2m1_codes,
        scales=decode.e4m3_steps,
    ),
    "nvfp4s": TileFormat(
        header=192, block=_NIBBLES, tile_blocks=4, steps=2, zero=12, codes=decode.e2m1_codes,
        scales=decode.scaled_e4m3_steps,
    ),
    "ternary": TileFormat(
        header=32, block=_PAIRS, tile_blocks=8, zero=1, codes=decode.two_bit_codes,
        scales=decode.half_steps,
    ),
    "k2": TileFormat(
        header=320, block=_PAIRS, tile_blocks=8, steps=2, codes=decode.two_bit_codes,
        scales=decode.nibble_pair_steps, minima=decode.nibble_pair_minima,
    ),
    "k3": TileFormat(
        header=224, block=192, tile_blocks=8, steps=2, zero=4, codes=decode.three_bit_codes,
        scales=decode.six_bit_steps,
    ),
    "k4": TileFormat(block=_NIBBLES, codes=decode.nibble_codes, **_K4),
    "k4nl": TileFormat(
        header=160, block=_NIBBLES, tile_blocks=8, zero=128, codes=decode.nl_codes,
        scales=decode.signed_steps,
    ),
    "k5": TileFormat(block=_FIVE_BITS, codes=decode.five_bit_codes, **_K4),
    "k6": TileFormat(
        header=288, block=384, tile_blocks=8, steps=2, zero=32, codes=decode.six_bit_codes,
        scales=decode.signed_pair_steps,
    ),
    "f32": TileFormat(
        header=0, block=2048, tile_blocks=1, elements=decode.f32_elements
    ),
    "f16": TileFormat(
        header=0, block=1024, tile_blocks=1, elements=decode.f16_elements
    ),
    "bf16": TileFormat(
        header=0, block=1024, tile_blocks=1, elements=decode.bf16_elements
    ),
    "fp8": TileFormat(
        header=64, block=512, elements=decode.e4m3_elements, tile_scale=decode.f32_scale
    ),
}  # fmt: skip


def names() -> list[str]:
    """Names of all formats that have kernels here, sorted."""
    return [name for name in formats.names() if _stem(name) in _STEMS]


def tile_format(name: str, cols: int) -> TileFormat:
    """The descriptor of a matrix with ``cols`` input channels. Raises UnsupportedFormat."""
    whole = formats.get(name)
    if _stem(name) not in _STEMS:
        raise UnsupportedFormat(
            f"format {name} has no kernel on this device; formats that have: {', '.join(names())}"
        )
    return replace(
        _STEMS[_stem(name)],
        name=name,
        tile_blocks=whole.group(cols) // BLOCK,
        tile_nbytes=whole.tile_nbytes(cols),
    )


def _stem(name: str) -> str:
    return name.split("-")[0]
