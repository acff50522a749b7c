"""An independent, element by element decoder written from the layout table of the packed formats.

It indexes bytes as the table says and shares no code with moestro.formats: what it reads is what a
kernel reads.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import slow_lattice

HEADERS = {
    "int8": 32,
    "int8z": 48,
    "int4": 32,
    "int4z": 48,
    "int4m": 64,
    "int5": 32,
    "int5m": 64,
    "lut4nl": 32,
}
#: ggml's table of IQ4_NL, and twice the values of e2m1 (sign, two exponent bits, one mantissa bit)
NONLINEAR = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
E2M1 = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]


def f16(data: bytes, at: int) -> float:
    return struct.unpack_from("<e", data, at)[0]


def tile_shape(name: str, cols: int) -> tuple[int, int]:
    """(channels per tile, bytes per tile)."""
    if name == "f32":
        return 32, 2048
    if name in ("f16", "bf16"):
        return 32, 1024
    if name.startswith("fp8"):
        group = math.ceil(cols / 32) * 32 if name == "fp8-row" else int(name[5:])
        return group, 64 + group // 32 * 512
    if name == "mxfp4":
        return 32, 272
    if name == "nvfp4":
        return 64, 576
    if name == "nvfp4s":
        return 128, 1216
    superblocks = {"k2": 1344, "k3": 1760, "k4": 2368, "k4nl": 2208, "k5": 2880, "k6": 3360}
    superblocks |= {"ternary": 1056, **slow_lattice.TILES}
    if name in superblocks:
        return 256, superblocks[name]
    kind, _, size = name.partition("-")
    group = math.ceil(cols / 32) * 32 if size == "row" else int(size[1:])
    return group, HEADERS[kind] + group // 32 * {"8": 512, "5": 320, "4": 256}[kind[3]]


def nibble(block: bytes, k: int, c: int) -> int:
    """Code of channel k (0..31) and row c in a 256-byte block."""
    half, rest = divmod(k, 16)
    j, i = divmod(rest, 4)
    byte = block[j * 64 + c * 4 + i]
    return byte >> 4 if half else byte & 15


def e4m3(code: int) -> float:
    """Sign, 4 bits of exponent with bias 7, 3 bits of mantissa; no infinities."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 0:
        magnitude = mantissa / 8 * 2.0**-6
    else:
        magnitude = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if sign else magnitude


def one_bit(block: bytes, k: int, c: int) -> int:
    j, i = divmod(k, 4)
    return block[c * 4 + i] >> j & 1


def high_bits(block: bytes, k: int, c: int) -> int:
    j, i = divmod(k, 4)
    h, jj = divmod(j, 4)
    return (block[h * 64 + c * 4 + i] >> (2 * jj)) & 3


def plain_float(name: str, tile: bytes, k: int, c: int) -> float:
    if name == "f32":
        return struct.unpack_from("<f", tile, 4 * (k * 16 + c))[0]
    if name == "f16":
        return f16(tile, 2 * (k * 16 + c))
    at = 2 * ((k // 2) * 32 + c * 2 + k % 2)
    return struct.unpack("<f", b"\0\0" + tile[at : at + 2])[0]


def small_float(kind: str, tile: bytes, k: int, c: int) -> float:
    """A 4-bit float times an exponent, or half a small float, or that times a large one."""
    if kind == "mxfp4":
        return math.ldexp(E2M1[nibble(tile[16:], k, c)], tile[c] - 128)
    if kind == "nvfp4s":
        d = struct.unpack_from("<f", tile, 4 * c)[0]
        scale = float(np.float32(d * e4m3(tile[64 + k // 16 * 16 + c])))
        return scale * E2M1[nibble(tile[192 + k // 32 * 256 :], k % 32, c)]
    return E2M1[nibble(tile[64 + k // 32 * 256 :], k % 32, c)] * e4m3(tile[k // 16 * 16 + c]) / 2


def element(name: str, tile: bytes, k: int, c: int) -> float:
    """Value of channel k and row c (0..15) of one tile, in Python's double arithmetic."""
    if name in ("f32", "f16", "bf16"):
        return plain_float(name, tile, k, c)
    block, kk = divmod(k, 32)
    kind = name.partition("-")[0]
    if kind == "fp8":
        code = tile[64 + block * 512 + kk * 16 + c]
        return struct.unpack_from("<f", tile, 4 * c)[0] * e4m3(code)
    if kind == "int8":
        code = tile[32 + block * 512 + (kk // 4) * 64 + c * 4 + kk % 4]
        return f16(tile, 2 * c) * (code - 128)
    if kind in slow_lattice.TILES:
        return slow_lattice.element(kind, tile, k, c)
    if kind in ("mxfp4", "nvfp4", "nvfp4s"):
        return small_float(kind, tile, k, c)
    if kind == "ternary":
        return f16(tile, 2 * c) * (high_bits(tile[32 + block * 128 :], kk, c) - 1)
    if kind == "int8z":
        code = tile[48 + block * 512 + (kk // 4) * 64 + c * 4 + kk % 4]
        return f16(tile, 2 * c) * (code - tile[32 + c])
    if kind == "k2":
        both = tile[64 + (k // 16) * 16 + c]
        code = high_bits(tile[320 + block * 128 :], kk, c)
        return f16(tile, 2 * c) * (both & 15) * code - f16(tile, 32 + 2 * c) * (both >> 4)
    if kind == "k3":
        sub, codes = k // 16, tile[224 + block * 192 :]
        low = tile[32 + (sub // 2) * 16 + c] >> (4 * (sub % 2)) & 15
        high = tile[160 + (sub // 4) * 16 + c] >> (2 * (sub % 4)) & 3
        code = high_bits(codes, kk, c) | one_bit(codes[128:], kk, c) << 2
        return f16(tile, 2 * c) * ((low | high << 4) - 32) * (code - 4)
    if kind == "k4nl":
        scale = struct.unpack_from("b", tile, 32 + block * 16 + c)[0]
        return f16(tile, 2 * c) * scale * NONLINEAR[nibble(tile[160 + block * 256 :], kk, c)]
    if kind in ("k4", "k5"):
        codes = tile[320 + block * (256 if kind == "k4" else 320) :]
        code = nibble(codes, kk, c)
        if kind == "k5":
            code |= one_bit(codes[256:], kk, c) << 4
        scale, low = tile[64 + block * 16 + c], tile[192 + block * 16 + c]
        return f16(tile, 2 * c) * scale * code - f16(tile, 32 + 2 * c) * low
    if kind == "k6":
        codes = tile[288 + block * 384 :]
        scale = struct.unpack_from("b", tile, 32 + (k // 16) * 16 + c)[0]
        code = nibble(codes, kk, c) | high_bits(codes[256:], kk, c) << 4
        return f16(tile, 2 * c) * scale * (code - 32)
    codes = tile[HEADERS[kind] + block * (320 if kind.startswith("int5") else 256) :]
    code = nibble(codes, kk, c)
    scale = f16(tile, 2 * c)
    if kind == "lut4nl":
        return scale * NONLINEAR[code]
    if kind.startswith("int5"):
        code |= one_bit(codes[256:], kk, c) << 4
        return scale * (code - 16) if kind == "int5" else scale * code + f16(tile, 32 + 2 * c)
    if kind == "int4":
        return scale * (code - 8)
    if kind == "int4z":
        return scale * (code - tile[32 + c])
    return scale * code + f16(tile, 32 + 2 * c)


def decode(name: str, data: bytes, rows: int, cols: int) -> np.ndarray:
    """Packed bytes -> float64 [rows, cols]."""
    group, nbytes = tile_shape(name, cols)
    groups = math.ceil(cols / group)
    assert len(data) == math.ceil(rows / 16) * groups * nbytes
    out = np.empty((rows, cols))
    for n in range(rows):
        for k in range(cols):
            at = ((n // 16) * groups + k // group) * nbytes
            out[n, k] = element(name, data[at : at + nbytes], k % group, n % 16)
    return out
