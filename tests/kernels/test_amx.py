"""The AMX kernels over the model of the tile registers: what only AMX machines would run otherwise.

The general tests of linear and MoE run on the model too; here are the shapes that its tiles make
special: token counts around 16 and 32, gathered and adjacent rows, lone tiles of channels.
"""

from __future__ import annotations

import packed_cases as cases
import pytest
import torch
from torch import Tensor

from moestro import formats, native
from moestro.core.errors import UnsupportedOp

AMX = "amx_emulated"
BEST = native.supported_isas()[-1]
INTEGER = [name for name in cases.FORMATS if not formats.get(name).is_float]


def on(isa: str, weight: cases.PackedWeight, x: Tensor, threads: int = 1) -> Tensor:
    with cases.running(isa, threads):
        return cases.linear(weight, x)


def test_the_model_runs_only_where_it_is_asked_for() -> None:
    assert AMX in native.emulated_isas()
    assert AMX not in native.supported_isas() and AMX not in native.built_isas()
    assert native.isa() != AMX
    with cases.running(AMX, 1):
        assert native.isa() == AMX
    if "amx" in native.built_isas() and "amx" not in native.supported_isas():
        with pytest.raises(UnsupportedOp, match="amx was asked for, but this machine supports"):
            native.set_isa("amx")


@pytest.mark.parametrize("name", INTEGER)
def test_token_counts_around_the_tile_edges(name: str) -> None:
    weight = cases.random_weight(name, 48, 544, seed=3)
    x = torch.randn(513, 544, generator=torch.Generator().manual_seed(4))
    expected = on(BEST, weight, x)
    assert torch.equal(on(AMX, weight, x, threads=2), expected)
    for tokens in (1, 8, 9, 15, 16, 17, 25, 31, 32, 33, 47, 48, 49, 64, 127, 129):
        assert torch.equal(on(AMX, weight, x[:tokens].contiguous()), expected[:tokens]), tokens


@pytest.mark.parametrize("name", INTEGER)
def test_extreme_codes_and_activations(name: str) -> None:
    weight = cases.extreme_weight(name, 37, 512)
    signs = torch.tensor([1.0, -1.0]).repeat(256)
    rows = [torch.ones(512), -torch.ones(512), signs, -signs, torch.zeros(512)]
    x = torch.stack(rows).repeat(7, 1)
    assert torch.equal(on(AMX, weight, x), on(BEST, weight, x))


def test_random_code_bytes() -> None:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(40, 512, generator=generator)
    for name in INTEGER:
        data = torch.randint(
            0, 256, (formats.get(name).nbytes(32, 512),), dtype=torch.uint8, generator=generator
        )
        outs = []
        for isa in (BEST, AMX):
            with cases.running(isa, 1):
                out = torch.zeros(40, 32)
                native.core.linear(None, x, name, data, 32, 512, out, cases.rows_of(40))
                outs.append(out)
        assert torch.allclose(*outs, rtol=0, atol=0, equal_nan=True), name


def test_a_row_that_is_not_finite_spoils_itself_alone() -> None:
    weight = cases.random_weight(INTEGER[0], 32, 256)
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(2))
    clean = on(AMX, weight, x)
    x[17, 77] = float("nan")
    dirty = on(AMX, weight, x)
    assert not torch.isfinite(dirty[17]).any()
    keep = torch.arange(40) != 17
    assert torch.equal(dirty[keep], clean[keep])
