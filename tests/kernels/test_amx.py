"""The AMX kernels over the model of the tile registers: what only AMX machines would run otherwise.

The general tests of linear and MoE run on the model too; here are the shapes that its tiles make
special: token counts around 16 and 32, gathered and adjacent rows, lone tiles of channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import packed_cases as cases
import pytest
import torch
from torch import Tensor

from moestro import formats, native
from moestro.core.errors import UnsupportedOp
from moestro.memory.expert_bank import BlobLayout, ExpertBank

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


def tile_sums(weights: Tensor, x: Tensor) -> Tensor:
    """What the tile instruction makes of weights [n, k] and x [tokens, k], in float64 of float32
    steps: per 32 channels a chain of the even ones and a chain of the odd ones, each from zero, and
    their sum added to the total. Products of bfloat16 are exact in float64, and so is their sum
    with a float32 of about their size."""
    total = torch.zeros(x.shape[0], weights.shape[0], dtype=torch.float64)
    for first in range(0, weights.shape[1], 32):
        chains = [torch.zeros_like(total), torch.zeros_like(total)]
        for k in range(first, min(first + 32, weights.shape[1])):
            product = x[:, k, None] * weights[None, :, k]
            chains[k % 2] = (chains[k % 2] + product).float().double()
        total = (total + (chains[0] + chains[1]).float().double()).float().double()
    return total


def test_bf16_sums_as_the_tile_instruction_does() -> None:
    weight = cases.random_weight("bf16", 37, 600)
    x = torch.randn(53, 600, generator=torch.Generator().manual_seed(3))
    expected = tile_sums(weight.unpack().double(), x.bfloat16().double())
    for tokens in (1, 16, 17, 32, 33, 53):
        found = on(AMX, weight, x[:tokens].contiguous())
        assert torch.equal(found.double(), expected[:tokens]), tokens


@pytest.mark.parametrize(("name", "cols"), [("fp8-g32", 96), ("fp8-g128", 384), ("fp8-row", 352)])
def test_fp8_scales_each_run_once(name: str, cols: int) -> None:
    """All finite codes, subnormal ones too, with a scale that is a power of two."""
    weight = formats.get(name)
    group = weight.group(cols)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()]
    generator = torch.Generator().manual_seed(4)
    values = codes[torch.randint(len(codes), (33, cols), generator=generator)]
    values[:, ::group] = 448.0  # the largest of each group sets its scale
    packed = cases.PackedWeight(weight, 33, cols, weight.pack(values / 8))
    assert torch.equal(packed.unpack(), values / 8)
    x = torch.randn(35, cols, generator=generator)
    total = torch.zeros(35, 33, dtype=torch.float64)
    for begin in range(0, cols, group):
        for first in range(begin, begin + group, 128):
            run = slice(first, min(first + 128, begin + group))
            sums = tile_sums(values[:, run].double(), x[:, run].bfloat16().double())
            total = (total + sums / 8).float().double()
    assert torch.equal(on(AMX, packed, x).double(), total)
    assert torch.equal(on(AMX, packed, x[:1]).double(), total[:1])


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


@contextmanager
def without_same_bits() -> Iterator[None]:
    native.set_same_bits(False)
    try:
        yield
    finally:
        native.set_same_bits(True)


@pytest.mark.parametrize("name", INTEGER)
def test_without_same_bits_many_tokens_take_folded_weights(name: str) -> None:
    """Weights and activations rounded to bfloat16, summed as the tile instruction does."""
    weight = cases.random_weight(name, 37, 290, seed=5)
    x = torch.randn(70, 290, generator=torch.Generator().manual_seed(6))
    folded = weight.unpack().bfloat16().double()
    expected = tile_sums(folded, x.bfloat16().double())
    exact = on(AMX, weight, x)
    with without_same_bits():
        for tokens in (33, 64, 70):
            found = on(AMX, weight, x[:tokens].contiguous(), threads=2)
            assert torch.equal(found.double(), expected[:tokens]), tokens
        assert torch.equal(on(AMX, weight, x[:32].contiguous()), exact[:32])
        assert torch.equal(on("scalar", weight, x), exact)
    assert not torch.equal(expected, exact.double())
    assert torch.equal(on(AMX, weight, x), exact)


def test_moe_without_same_bits() -> None:
    """One expert of three gets enough tokens for folded weights; others keep their bits."""
    generator = torch.Generator().manual_seed(7)
    parts = [("int4-g32", 48, 96), ("int4-g32", 48, 96), ("k6", 96, 48)]
    bank = ExpertBank(BlobLayout.plan(parts), 3, activation="silu")
    for e in range(3):
        packed = [
            formats.get(n).pack(torch.randn(r, c, generator=generator) / c**0.5)
            for n, r, c in parts
        ]
        bank.layout.fill(bank.blob(e), packed)
    x = torch.randn(60, 96, generator=generator)
    ids = torch.ones(60, 1, dtype=torch.int32)
    ids[5:20] = 0
    ids[50:55] = 2
    projections = [(p.format_name, p.rows, p.cols, p.offset) for p in bank.projections]

    def run() -> Tensor:
        out = torch.zeros_like(x)
        native.core.moe(
            None, x, ids, torch.ones(60, 1), bank.pointers, projections, "silu", out,
            cases.rows_of(60),
        )  # fmt: skip
        return out

    with cases.running(AMX, 2):
        exact = run()
        with without_same_bits():
            folded = run()
    few = (ids != 1)[:, 0]
    assert torch.equal(folded[few], exact[few])
    assert not torch.equal(folded[~few], exact[~few])
    error = (folded - exact).norm() / exact.norm()
    assert 0 < float(error) < 0.01


def test_the_self_check_is_of_the_exact_kernels() -> None:
    weight = cases.random_weight("int4-g32", 37, 290, seed=5)
    x = torch.randn(70, 290, generator=torch.Generator().manual_seed(6))
    exact, found = on(AMX, weight, x), torch.zeros(70, 37)
    with cases.running(AMX, 1), without_same_bits():
        native.core.multiply(AMX, x, "int4-g32", weight.data, 37, 290, found)
    assert torch.equal(found, exact)
