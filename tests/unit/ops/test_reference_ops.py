"""The reference ops against formulas written out here, their edges, and what they refuse."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from moestro import formats
from moestro.core.errors import InvalidRequest, UnsupportedOp
from moestro.formats.base import PackedWeight
from moestro.ops.contracts import ACTIVATIONS, Batch, ExpertBiases, KvLayer
from moestro.ops.reference import ReferenceOps

OPS = ReferenceOps()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def packed(weight: Tensor) -> PackedWeight:
    f32 = formats.get("f32")
    return PackedWeight(
        format=f32, rows=weight.shape[0], cols=weight.shape[1], data=f32.pack(weight)
    )


def count(n: int) -> Tensor:
    return torch.tensor([n], dtype=torch.int32)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Experts:
    """Dense experts [E, I, H], [E, I, H], [E, H, I] as an ExpertTable."""

    gate: Tensor
    up: Tensor
    down: Tensor
    activation: str = "silu"
    biases: ExpertBiases | None = None
    input_orders: Tensor | None = None
    projections: tuple = field(default=())

    @property
    def pointers(self) -> Tensor:
        return torch.zeros(len(self.gate), dtype=torch.int64)

    def expert(self, index: int):
        return packed(self.gate[index]), packed(self.up[index]), packed(self.down[index])


def test_embed_tokens_takes_live_rows_only():
    table, out = torch.randn(7, 5), torch.full((4, 5), 9.0)
    OPS.embed_tokens(ints(6, 0, 3, 99), packed(table), out, count(3))
    assert torch.equal(out[:3], table[[6, 0, 3]])
    assert torch.equal(out[3], torch.full((5,), 9.0))


@pytest.mark.parametrize("bad", [7, -1])
def test_embed_tokens_refuses_ids_outside_the_vocabulary(bad: int):
    out = torch.zeros(2, 5)
    with pytest.raises(InvalidRequest, match=rf"token id {bad} .* 0\.\.6"):
        OPS.embed_tokens(ints(0, bad), packed(torch.randn(7, 5)), out, count(2))
    assert not out.any()


def test_gather_rows():
    x, out = torch.randn(6, 3), torch.zeros(4, 3)
    OPS.gather_rows(x, ints(5, 5, 1, 77), out, count(3))
    assert torch.equal(out[:3], x[[5, 5, 1]]) and not out[3].any()
    with pytest.raises(InvalidRequest, match="row index 77"):
        OPS.gather_rows(x, ints(5, 5, 1, 77), out, count(4))


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("in_place", [False, True])
def test_rmsnorm(groups: int, in_place: bool):
    x, weight = torch.randn(4, 12), torch.randn(12 // groups)
    want = x.clone()
    for t in range(3):
        for g in range(groups):
            part = x[t, g * 12 // groups : (g + 1) * 12 // groups]
            norm = math.sqrt(sum(float(v) ** 2 for v in part) / len(part) + 1e-5)
            want[t, g * 12 // groups : (g + 1) * 12 // groups] = part / norm * weight
    out = x if in_place else x.clone()
    OPS.rmsnorm(x, weight, out, count(3), eps=1e-5, groups=groups)
    torch.testing.assert_close(out, want)


def test_rmsnorm_adds_to_the_residual_first():
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    total, out = x + residual, torch.zeros(3, 8)
    kept = residual[2].clone()
    OPS.rmsnorm(x, weight, out, count(2), eps=1e-6, residual=residual)
    want = total * torch.rsqrt(total.square().mean(1, keepdim=True) + 1e-6) * weight
    torch.testing.assert_close(out[:2], want[:2])
    assert torch.equal(residual[:2], total[:2]) and torch.equal(residual[2], kept)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_linear(bias: bool, accumulate: bool):
    x, weight, out = torch.randn(4, 9), torch.randn(5, 9), torch.randn(4, 5)
    b, before = torch.randn(5), out.clone()
    want = x.double() @ weight.double().T + (b if bias else 0) + (before if accumulate else 0)
    OPS.linear(x, packed(weight), out, count(3), bias=b if bias else None, accumulate=accumulate)
    torch.testing.assert_close(out[:3], want[:3].float())
    assert torch.equal(out[3], before[3])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_rope_turns_pairs_of_the_first_channels(interleaved: bool, rotary_dim: int):
    heads, head_dim, half = 3, 8, rotary_dim // 2
    x, positions = torch.randn(4, heads * head_dim), ints(9, 0, 5, 2)
    angles = torch.randn(10, half)
    got = x.clone()
    OPS.rope(
        got, positions, angles.cos(), angles.sin(), count(3), heads=heads, interleaved=interleaved
    )
    want = x.clone()
    for t in range(3):
        for h in range(heads):
            for i in range(half):
                a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
                a, b, turn = h * head_dim + a, h * head_dim + b, float(angles[positions[t], i])
                want[t, a] = x[t, a] * math.cos(turn) - x[t, b] * math.sin(turn)
                want[t, b] = x[t, b] * math.cos(turn) + x[t, a] * math.sin(turn)
    torch.testing.assert_close(got, want)


def test_rope_refuses_positions_past_the_table():
    table, x = torch.zeros(10, 2), torch.zeros(1, 4)
    with pytest.raises(InvalidRequest, match="position 10 is outside the rope table"):
        OPS.rope(x, ints(10), table, table, count(1), heads=1)


def cache_of(pages: int, kv_heads: int, page_size: int, head_dim: int, dtype=torch.float32):
    return KvLayer(
        k=torch.zeros(pages, kv_heads, page_size // 16, head_dim, 16, dtype=dtype),
        v=torch.zeros(pages, kv_heads, page_size, head_dim, dtype=dtype),
    )


def batch_of(positions: Tensor, slots: Tensor, page_table: Tensor, live: int) -> Batch:
    batch = Batch.allocate(
        tokens=len(positions), slots=len(page_table), pages_per_slot=page_table.shape[1], logits=1
    )
    batch.positions.copy_(positions)
    batch.slots.copy_(slots)
    batch.page_table.copy_(page_table)
    batch.counts[0] = live
    return batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_write_kv_layout(dtype: torch.dtype):
    cache = cache_of(5, 2, 32, 3, dtype)
    k, v = torch.randn(4, 6), torch.randn(4, 6)
    batch = batch_of(ints(0, 33, 17, 63), ints(0, 1, 1, 1), torch.tensor([[4, 0], [2, 3]]), live=3)
    OPS.write_kv(k, v, cache, batch)
    want = cache_of(5, 2, 32, 3, dtype)
    for t, (page, at) in enumerate(((4, 0), (3, 1), (2, 17))):
        for head in range(2):
            for d in range(3):
                want.k[page, head, at // 16, d, at % 16] = k[t, head * 3 + d]
                want.v[page, head, at, d] = v[t, head * 3 + d]
    assert torch.equal(cache.k, want.k) and torch.equal(cache.v, want.v)


@pytest.mark.parametrize(
    ("positions", "slots", "table", "message"),
    [
        ((64,), (0,), [[0, 1]], "position 64 is outside the slot's pages, which has 0..63"),
        ((0,), (1,), [[0, 1]], "sequence slot 1"),
        ((40,), (0,), [[0, 5]], "page 5 is outside the cache"),
        ((0,), (0,), [[-1, 1]], "page -1"),
    ],
)
def test_cache_ops_refuse_what_is_outside(positions, slots, table, message: str):
    cache, kv = cache_of(5, 1, 32, 4), torch.ones(1, 4)
    batch = batch_of(ints(*positions), ints(*slots), torch.tensor(table), live=1)
    with pytest.raises(InvalidRequest, match=message):
        OPS.write_kv(kv, kv, cache, batch)
    with pytest.raises(InvalidRequest, match=message):
        OPS.attention(kv, cache, torch.zeros(1, 4), batch, heads=1, scale=1.0)
    assert not cache.k.any() and not cache.v.any()


@pytest.mark.parametrize("window", [0, 1, 5, 40])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_attention_is_causal_softmax_over_the_slot(heads: int, kv_heads: int, window: int):
    head_dim, page_size, context = 8, 16, 37
    cache = cache_of(8, kv_heads, page_size, head_dim)
    table = torch.tensor([[6, 1, 4], [0, 7, 2]])
    k, v = (
        torch.randn(2, context, kv_heads * head_dim),
        torch.randn(2, context, kv_heads * head_dim),
    )
    for slot in range(2):
        everything = batch_of(
            torch.arange(context), torch.full((context,), slot), table, live=context
        )
        OPS.write_kv(k[slot], v[slot], cache, everything)
    # slot 1 prefills 20..22 while slot 0 decodes 36; the last row is not live
    positions, slots = ints(20, 21, 22, 36, 0), ints(1, 1, 1, 0, 0)
    q, out = torch.randn(5, heads * head_dim), torch.full((5, heads * head_dim), 9.0)
    OPS.attention(
        q, cache, out, batch_of(positions, slots, table, live=4),
        heads=heads, scale=0.3, window=window,
    )  # fmt: skip
    for t in range(4):
        slot, at = int(slots[t]), int(positions[t])
        first = max(0, at + 1 - window) if window else 0
        keys = k[slot, first : at + 1].view(-1, kv_heads, head_dim).transpose(0, 1)
        values = v[slot, first : at + 1].view(-1, kv_heads, head_dim).transpose(0, 1)
        want = scaled_dot_product_attention(
            q[t].view(1, heads, 1, head_dim), keys[None], values[None], scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(out[t], want.flatten())
    assert torch.equal(out[4], torch.full_like(out[4], 9.0))


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("level", [-torch.inf, -50.0, 0.0, 3.0, 1e4])
def test_attention_sinks_take_their_share_of_the_softmax(level: float, window: int):
    heads, head_dim, context = 4, 8, 21
    cache, table = cache_of(2, 2, 16, head_dim), torch.tensor([[1, 0]])
    k, v, q = torch.randn(context, 16), torch.randn(context, 16), torch.randn(context, 32)
    batch = batch_of(torch.arange(context), torch.zeros(context), table, live=context)
    OPS.write_kv(k, v, cache, batch)
    sinks, out = level + torch.randn(heads), torch.zeros(context, 32)
    OPS.attention(q, cache, out, batch, heads=heads, scale=0.5, window=window, sinks=sinks)
    for t in range(context):
        first = max(0, t + 1 - window) if window else 0
        for h in range(heads):
            at = slice(8 * (h // 2), 8 * (h // 2) + 8)
            keys = k[first : t + 1, at].double()
            scores = keys @ q[t, 8 * h : 8 * h + 8].double() * 0.5
            peak = max(float(scores.max()), float(sinks[h]))
            shares = (scores - peak).exp()
            total = shares.sum() + math.exp(float(sinks[h]) - peak)
            want = (shares / total) @ v[first : t + 1, at].double()
            torch.testing.assert_close(out[t, 8 * h : 8 * h + 8], want.float())


def test_attention_refuses_heads_that_do_not_share():
    cache, batch = cache_of(1, 2, 16, 4), batch_of(ints(0), ints(0), torch.tensor([[0]]), live=1)
    q = torch.zeros(1, 12)
    with pytest.raises(UnsupportedOp, match="3 heads do not share 2"):
        OPS.attention(q, cache, q.clone(), batch, heads=3, scale=1.0)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("top_k", [1, 3, 6])
def test_route(normalize: bool, top_k: int):
    logits = torch.randn(5, 6)
    ids, weights = torch.full((5, top_k), -7, dtype=torch.int32), torch.full((5, top_k), -7.0)
    OPS.route(logits, ids, weights, count(4), normalize=normalize)
    for t in range(4):
        probs = [math.exp(v) for v in logits[t].tolist()]
        probs = [p / sum(probs) for p in probs]
        order = sorted(range(6), key=lambda e: -probs[e])[:top_k]
        share = sum(probs[e] for e in order) if normalize else 1.0
        assert ids[t].tolist() == order
        assert weights[t].tolist() == pytest.approx([probs[e] / share for e in order], rel=1e-5)
    assert (ids[4] == -7).all() and (weights[4] == -7).all()


def test_route_ties_go_to_the_lower_id():
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0]])
    ids, weights = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, 4)
    OPS.route(logits, ids, weights, count(1), normalize=True)
    assert ids.tolist() == [[1, 2, 4, 0]]
    with pytest.raises(UnsupportedOp, match="top 4 of 3"):
        OPS.route(logits[:, :3], ids, weights, count(1), normalize=True)


def gated(activation: str, g: float, u: float) -> float:
    """The activations' formulas, one number at a time."""
    if activation == "swiglu_oai":
        g, u = min(g, 7.0), max(-7.0, min(u, 7.0))
        return g / (1 + math.exp(-1.702 * g)) * (u + 1)
    act = {
        "silu": g / (1 + math.exp(-g)),
        "gelu": g * (1 + math.erf(g / math.sqrt(2))) / 2,
        "gelu_tanh": g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) / 2,
        "relu": max(g, 0.0),
    }
    return act[activation] * u


def expert_output(experts: Experts, e: int, x: Tensor) -> Tensor:
    gate, up = experts.gate[e].double() @ x.double(), experts.up[e].double() @ x.double()
    if experts.biases is not None:
        gate, up = gate + experts.biases.gate[e], up + experts.biases.up[e]
    pairs = zip(gate.tolist(), up.tolist(), strict=True)
    hidden = torch.tensor([gated(experts.activation, g, u) for g, u in pairs]).double()
    out = experts.down[e].double() @ hidden
    return out if experts.biases is None else out + experts.biases.down[e]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_moe_activations_and_biases(activation: str, biased: bool):
    experts = Experts(
        3 * torch.randn(4, 7, 6), 4 * torch.randn(4, 7, 6), torch.randn(4, 6, 7), activation
    )
    if biased:
        experts.biases = ExpertBiases(
            gate=5 * torch.randn(4, 7), up=5 * torch.randn(4, 7), down=torch.randn(4, 6)
        )
    x, weights, out = torch.randn(3, 6), torch.rand(3, 2), torch.zeros(3, 6)
    ids = torch.tensor([[2, 0], [3, -1], [1, 2]], dtype=torch.int32)
    want = torch.zeros(3, 6, dtype=torch.float64)
    for t in range(3):
        for a in range(2):
            if ids[t, a] >= 0:
                want[t] += weights[t, a] * expert_output(experts, int(ids[t, a]), x[t])
    OPS.moe(x, ids, weights, experts, out, count(3))
    torch.testing.assert_close(out, want.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moe_sums_the_chosen_experts(accumulate: bool, dtype: torch.dtype):
    experts = Experts(torch.randn(4, 7, 6), torch.randn(4, 7, 6), torch.randn(4, 6, 7))
    x, weights = torch.randn(4, 6), torch.rand(4, 3)
    ids = torch.tensor([[2, -1, 0], [3, 3, 1], [-1, -1, -5], [0, 1, 2]], dtype=torch.int32)
    out = torch.randn(4, 6)
    want = out.double() if accumulate else torch.zeros(4, 6, dtype=torch.float64)
    for t in range(3):
        for a in range(3):
            if ids[t, a] >= 0:
                want[t] += weights[t, a] * expert_output(experts, int(ids[t, a]), x[t])
    want[3] = out[3]
    ReferenceOps(dtype).moe(x, ids, weights, experts, out, count(3), accumulate=accumulate)
    torch.testing.assert_close(out, want.float(), rtol=1e-5, atol=1e-5)


def test_moe_refuses_unknown_experts_and_activations():
    experts = Experts(torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.randn(2, 4, 3))
    x, weights, out = torch.randn(1, 4), torch.ones(1, 1), torch.zeros(1, 4)
    with pytest.raises(InvalidRequest, match=r"expert id 2 .* 0\.\.1"):
        OPS.moe(x, torch.tensor([[2]], dtype=torch.int32), weights, experts, out, count(1))
    experts.activation = "relu2"
    with pytest.raises(UnsupportedOp, match="'relu2'; the reference has silu, gelu,"):
        OPS.moe(x, torch.tensor([[0]], dtype=torch.int32), weights, experts, out, count(1))
    assert not out.any()


def test_silu_mul_and_sigmoid():
    gate, up, out = torch.randn(3, 4), torch.randn(3, 4), torch.full((3, 4), 9.0)
    OPS.silu_mul(gate, up, out, count(2))
    torch.testing.assert_close(out[:2], (gate / (1 + torch.exp(-gate)) * up)[:2])
    assert (out[2] == 9).all()
    x = gate.clone()
    OPS.sigmoid(x, count(2))
    torch.testing.assert_close(x[:2], (1 / (1 + torch.exp(-gate)))[:2])
    assert torch.equal(x[2], gate[2])


@pytest.mark.parametrize("rows", [-1, 4])
def test_row_counts_are_checked(rows: int):
    x = torch.zeros(3, 4)
    with pytest.raises(InvalidRequest, match=f"{rows} live rows in buffers that hold 3"):
        OPS.sigmoid(x, count(rows))


def test_zero_rows_do_nothing():
    x, cache = torch.randn(3, 4), cache_of(1, 1, 16, 4)
    before, batch = x.clone(), batch_of(ints(0), ints(0), torch.tensor([[0]]), live=0)
    OPS.sigmoid(x, count(0))
    OPS.rmsnorm(x, torch.ones(4), x, count(0), eps=1e-5)
    OPS.rope(x, ints(0, 0, 0), torch.zeros(1, 2), torch.zeros(1, 2), count(0), heads=1)
    OPS.write_kv(x, x, cache, batch)
    OPS.attention(x, cache, x, batch, heads=1, scale=1.0)
    OPS.route(x, torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2), count(0), normalize=True)
    assert torch.equal(x, before) and not cache.v.any()
