"""The grids that kernels read are those that the gguf package publishes."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import slow_lattice

from moestro import formats

ROOT = Path(__file__).resolve().parents[3]
LATTICES = [n for n in formats.names() if n in slow_lattice.TILES]


def test_the_table_is_what_its_generator_writes():
    spec = importlib.util.spec_from_file_location(
        "generate_lattice_grids", ROOT / "tools/generate_lattice_grids.py"
    )
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.TABLE.read_text(encoding="utf-8") == generator.text()


@pytest.mark.parametrize("name", LATTICES)
def test_points_are_the_published_ones(name):
    want = np.array(slow_lattice.grid(name), dtype=np.float32)
    if name.startswith("iq1"):
        want = 8 * want + 1  # the eighth that is added, or less often taken away
    assert np.array_equal(formats.get(name).points, want)


def test_all_lattices_are_here():
    assert set(LATTICES) == set(slow_lattice.TILES)
