"""The lattice formats, element by element, from their table and the grids of the gguf package."""

from __future__ import annotations

import struct

from gguf import quants

#: bytes per tile
TILES = {
    "iq1s": 816, "iq1m": 928, "iq2xxs": 1120, "iq2xs": 1248, "iq2s": 1312, "iq3xxs": 1632,
    "iq3s": 1760,
}  # fmt: skip
#: header, block, weights per point, bits above eight, scales per 32, divisor of d, minus masks
_SHAPES = {
    "iq1s": (96, 90, 8, 3, 1, 8, 1),
    "iq1m": (160, 96, 8, 3, 2, 8, 4),
    "iq2xxs": (96, 128, 8, 0, 1, 8, 0),
    "iq2xs": (160, 136, 8, 1, 2, 8, 0),
    "iq2s": (160, 144, 8, 2, 2, 8, 0),
    "iq3xxs": (96, 192, 4, 0, 1, 4, 0),
    "iq3s": (96, 208, 4, 1, 1, 1, 0),
}


def grid(kind: str) -> list[list[int]]:
    published = {"iq1s": "IQ1_S", "iq1m": "IQ1_M"}.get(kind) or f"IQ{kind[2]}_{kind[3:].upper()}"
    owner = getattr(quants, published)
    owner.init_grid()
    return owner.grid.reshape(owner.grid_shape).astype(int).tolist()


_GRIDS = {kind: grid(kind) for kind in TILES}


def element(kind: str, tile: bytes, k: int, c: int) -> float:
    """Value of channel k and row c (0..15) of one tile."""
    header, size, row, high, steps, divisor, minus = _SHAPES[kind]
    block, kk = divmod(k, 32)
    sub = block * steps + kk * steps // 32
    scale = 2 * (tile[32 + sub // 2 * 16 + c] >> (4 * (sub % 2)) & 15) + 1
    data = tile[header + block * size : header + (block + 1) * size]
    half, n = divmod(kk // row, 4)
    number = data[64 * half + 4 * c + n]
    bits = data[512 // row + 8 * high * half :]
    at = n % 2 * 32 + 2 * c + n // 2
    for plane in range(high):
        number |= (bits[8 * plane + at // 8] >> (at % 8) & 1) << (8 + plane)
    level = _GRIDS[kind][number][kk % row]
    rest = data[512 // row + 64 * high // row :]
    step = struct.unpack_from("<e", tile, 2 * c)[0] / divisor * scale
    if minus:
        mask = struct.unpack_from("<H", rest, kk * minus // 32 * 2)[0]
        return step * (8 * level + (-1 if mask >> c & 1 else 1))
    return step * (-level if rest[4 * c + kk % 4] >> (kk // 4) & 1 else level)
