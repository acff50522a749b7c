"""Owns the table of GGUF tensor types: number, name, elements and bytes per block.

Numbers and block structs are those of ggml (ggml.h, ggml-common.h). A number that is not here is
refused by the reader: its size is unknown, so nothing about its tensor could be checked.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GgmlType:
    """One tensor type: ``block`` consecutive elements of a row take ``nbytes`` bytes."""

    number: int
    name: str
    block: int
    nbytes: int


_F16 = 2  # bytes of a half-precision scale or min
_ROWS = (
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, _F16 + 16),
    (3, "Q4_1", 32, 2 * _F16 + 16),
    (6, "Q5_0", 32, _F16 + 4 + 16),
    (7, "Q5_1", 32, 2 * _F16 + 4 + 16),
    (8, "Q8_0", 32, _F16 + 32),
    (9, "Q8_1", 32, 2 * _F16 + 32),  # two halves since ggml's block_q8_1 dropped its floats
    (10, "Q2_K", 256, 2 * _F16 + 16 + 64),
    (11, "Q3_K", 256, _F16 + 32 + 64 + 12),
    (12, "Q4_K", 256, 2 * _F16 + 12 + 128),
    (13, "Q5_K", 256, 2 * _F16 + 12 + 32 + 128),
    (14, "Q6_K", 256, _F16 + 128 + 64 + 16),
    (15, "Q8_K", 256, 4 + 256 + 32),
    (16, "IQ2_XXS", 256, _F16 + 64),
    (17, "IQ2_XS", 256, _F16 + 64 + 8),
    (18, "IQ3_XXS", 256, _F16 + 64 + 32),
    (19, "IQ1_S", 256, _F16 + 32 + 16),
    (20, "IQ4_NL", 32, _F16 + 16),
    (21, "IQ3_S", 256, _F16 + 64 + 8 + 32 + 4),
    (22, "IQ2_S", 256, _F16 + 64 + 8 + 8),
    (23, "IQ4_XS", 256, _F16 + 2 + 4 + 128),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 32 + 16 + 8),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, _F16 + 48 + 4),
    (35, "TQ2_0", 256, _F16 + 64),
    (39, "MXFP4", 32, 1 + 16),
    (40, "NVFP4", 64, 4 + 32),
    (41, "Q1_0", 128, _F16 + 16),
)

TYPES: dict[int, GgmlType] = {row[0]: GgmlType(*row) for row in _ROWS}

#: Types that files once used and ggml itself no longer reads: number -> name.
REMOVED: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
