"""Writes csrc/formats/lattice_grids.def from the grids that the gguf package publishes.

python tools/generate_lattice_grids.py           # write it
python tools/generate_lattice_grids.py --check   # exit 1 if it is not up to date

The grids of GGUF's IQ1, IQ2 and IQ3 types are constants of those types: lists of the points that
four or eight neighbouring weights may take. Each point is one 16-bit word here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import quants

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "csrc/formats/lattice_grids.def"
#: constant in C++ -> type that publishes it
GRIDS = {
    "kGridIq2xxs": "IQ2_XXS",
    "kGridIq2xs": "IQ2_XS",
    "kGridIq2s": "IQ2_S",
    "kGridIq3xxs": "IQ3_XXS",
    "kGridIq3s": "IQ3_S",
    "kGridIq1": "IQ1_S",
}
PER_LINE = 12

PREAMBLE = """\
// The grids of ggml's IQ types: what points eight (or, in IQ3, four) neighbouring weights may take.
// Written by tools/generate_lattice_grids.py; do not edit.
// MOESTRO_GRID(name, number of points, points...)
//
// Eight weights: bits 2n, 2n + 1 are the level of weight n. Four weights: nibble m is the level of
// weight 0, 2, 1, 3 for m = 0, 1, 2, 3, so that a shift by four brings the weights 0, 1 to 2, 3.
"""


def words(source_type: str) -> npt.NDArray[np.uint16]:
    """The grid of a type, one word per point."""
    owner = getattr(quants, source_type)
    published = np.frombuffer(bytes.fromhex(owner.grid_hex.decode()), dtype="<u2")
    if owner.grid_shape[1] == 8:
        return published
    # Published as nibbles 0, 1, 2, 3: swap the two in the middle.
    middle = (published >> 4 & 0x00F0) | (published << 4 & 0x0F00)
    return (published & np.uint16(0xF00F)) | middle.astype(np.uint16)


def invocation(name: str, source_type: str) -> str:
    grid = [f"0x{word:04x}" for word in words(source_type).tolist()]
    rows = [", ".join(grid[at : at + PER_LINE]) for at in range(0, len(grid), PER_LINE)]
    return f"MOESTRO_GRID({name}, {len(grid)},\n  " + ",\n  ".join(rows) + ")\n"


def text() -> str:
    return PREAMBLE + "".join(invocation(name, kind) for name, kind in GRIDS.items())


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        if not TABLE.is_file() or TABLE.read_text(encoding="utf-8") != text():
            print(f"{TABLE.relative_to(ROOT)}: run python tools/generate_lattice_grids.py")
            return 1
        return 0
    TABLE.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
