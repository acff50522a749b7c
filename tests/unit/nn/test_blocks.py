"""Blocks over the reference ops: what they compute, and which buffers they touch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from moestro import formats
from moestro.core.errors import InvalidRequest
from moestro.formats.base import PackedWeight
from moestro.memory.expert_bank import BlobLayout, ExpertBank
from moestro.nn.attention import GroupedQueryAttention
from moestro.nn.buffers import Buffers, Scratch
from moestro.nn.decoder import Decoder
from moestro.nn.embedding import Embedding, LanguageModelHead
from moestro.nn.kv_cache import allocate_kv
from moestro.nn.linear import Linear
from moestro.nn.mlp import GatedMlp, Mlp
from moestro.nn.moe import MixtureOfExperts
from moestro.nn.norm import RMSNorm
from moestro.nn.rope import Rope, RopeConfig
from moestro.nn.router import Router
from moestro.ops.contracts import Batch
from moestro.ops.reference import ReferenceOps

HIDDEN, INTER = 12, 20
OPS = ReferenceOps()
F32 = formats.get("f32")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def linear(n: int, k: int = HIDDEN, bias: bool = False) -> tuple[Linear, Tensor]:
    weight = torch.randn(n, k)
    packed = PackedWeight(format=F32, rows=n, cols=k, data=F32.pack(weight))
    return Linear(weight=packed, bias=torch.randn(n) if bias else None), weight


def bank(count: int) -> tuple[ExpertBank, Tensor, Tensor, Tensor]:
    gate, up = torch.randn(count, INTER, HIDDEN), torch.randn(count, INTER, HIDDEN)
    down = torch.randn(count, HIDDEN, INTER)
    shapes = (("f32", INTER, HIDDEN), ("f32", INTER, HIDDEN), ("f32", HIDDEN, INTER))
    experts = ExpertBank(BlobLayout.plan(shapes), count)
    for e in range(count):
        experts.layout.fill(experts.blob(e), [F32.pack(part[e]) for part in (gate, up, down)])
    return experts, gate, up, down


def buffers_of(block, tokens: int) -> Buffers:
    return Buffers(block.scratch(), tokens=tokens, logits=1, hidden_size=HIDDEN, vocab_size=2)


def rows(n: int) -> Tensor:
    return torch.tensor([n], dtype=torch.int32)


def gated(gate: Tensor, up: Tensor, down: Tensor, x: Tensor) -> Tensor:
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def test_equal_scratch_is_one_buffer_and_others_are_apart():
    a, wider = Scratch("a", 4), Scratch("a", 5)
    ids = Scratch("a", 4, torch.int32, fill=3)
    buffers = Buffers(
        [a, Scratch("a", 4), wider, ids], tokens=6, logits=2, hidden_size=8, vocab_size=11
    )
    assert buffers[a] is buffers[Scratch("a", 4)]
    assert buffers[a].shape == (6, 4) and buffers[a].dtype == torch.float32
    assert buffers[wider].shape == (6, 5)
    assert (buffers[ids] == 3).all() and buffers[ids].dtype == torch.int32
    assert buffers.logits.shape == (2, 11) and buffers.logit_hidden.shape == (2, 8)
    assert buffers.nbytes == 4 * (6 * 4 + 6 * 5 + 6 * 4 + 2 * 11 + 2 * 8)
    with pytest.raises(KeyError):
        buffers[Scratch("b", 4)]


def test_mlp_adds_to_the_stream():
    experts, gate, up, down = bank(1)
    block, x, out = Mlp(bank=experts), torch.randn(4, HIDDEN), torch.randn(4, HIDDEN)
    want, buffers = out + gated(gate[0], up[0], down[0], x), buffers_of(block, 4)
    want[3] = out[3]
    for _ in range(2):  # the constants survive a step
        again = out.clone()
        block.forward(OPS, x, again, rows(3), buffers)
        torch.testing.assert_close(again, want, rtol=1e-5, atol=1e-4)


def test_gated_mlp_weighs_by_the_sigmoid_of_its_gate():
    experts, gate, up, down = bank(1)
    share, w = linear(1)
    block, x, out = GatedMlp(gate=share, bank=experts), torch.randn(3, HIDDEN), torch.zeros(3, 12)
    want = torch.sigmoid(x @ w.T) * gated(gate[0], up[0], down[0], x)
    block.forward(OPS, x, out, rows(3), buffers_of(block, 3))
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("with_shared", [False, True])
def test_moe_adds_routed_and_shared_experts(normalize: bool, with_shared: bool):
    experts, gate, up, down = bank(5)
    one, gate1, up1, down1 = bank(1)
    router, w = linear(5)
    block = MixtureOfExperts(
        router=Router(gate=router, top_k=2, normalize=normalize),
        experts=experts,
        shared=Mlp(bank=one) if with_shared else None,
    )
    x, out = torch.randn(4, HIDDEN), torch.randn(4, HIDDEN)
    probs, ids = (x @ w.T).softmax(1).topk(2)
    if normalize:
        probs = probs / probs.sum(1, keepdim=True)
    want = out.clone()
    for t in range(4):
        for p, e in zip(probs[t], ids[t], strict=True):
            want[t] += p * gated(gate[e], up[e], down[e], x[t])
        if with_shared:
            want[t] += gated(gate1[0], up1[0], down1[0], x[t])
    block.forward(OPS, x, out, rows(4), buffers_of(block, 4))
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rotary_dim", [8, 4])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_attention_with_partial_rotary_and_norms(rotary_dim: int, qk_norm: bool):
    heads, kv_heads, head_dim, n = 4, 2, 8, 19
    q, wq = linear(heads * head_dim)
    k, wk = linear(kv_heads * head_dim, bias=True)
    v, wv = linear(kv_heads * head_dim)
    o, wo = linear(HIDDEN, heads * head_dim)
    norms = [RMSNorm(weight=torch.rand(head_dim), eps=1e-6, groups=g) for g in (heads, kv_heads)]
    rope = Rope.build(RopeConfig(theta=100.0, rotary_dim=rotary_dim), max_positions=n)
    block = GroupedQueryAttention(
        q_proj=q, k_proj=k, v_proj=v, o_proj=o, rope=rope, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, q_norm=norms[0] if qk_norm else None,
        k_norm=norms[1] if qk_norm else None,
    )  # fmt: skip
    x, out = torch.randn(n, HIDDEN), torch.randn(n, HIDDEN)

    def heads_of(y: Tensor, count: int, norm: RMSNorm | None) -> Tensor:
        y = y.view(n, count, head_dim)
        if norm is not None:
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * norm.weight
        half = rotary_dim // 2
        a, b, rest = y.split([half, half, head_dim - rotary_dim], dim=-1)
        c, s = rope.cos[:, None], rope.sin[:, None]
        return torch.cat([a * c - b * s, b * c + a * s, rest], dim=-1).transpose(0, 1)

    keys = heads_of(x @ wk.T + k.bias, kv_heads, norms[1] if qk_norm else None)
    queries = heads_of(x @ wq.T, heads, norms[0] if qk_norm else None)
    values = (x @ wv.T).view(n, kv_heads, head_dim).transpose(0, 1)
    mixed = scaled_dot_product_attention(
        queries[None], keys[None], values[None], is_causal=True, enable_gqa=True
    )[0]
    want = out + mixed.transpose(0, 1).flatten(1) @ wo.T

    batch = Batch.allocate(tokens=n, slots=1, pages_per_slot=2, logits=1)
    batch.positions.copy_(torch.arange(n))
    batch.page_table.copy_(torch.tensor([[1, 0]]))
    batch.counts[0] = n
    cache = allocate_kv(
        pages=2, page_size=16, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.float32
    )
    block.forward(OPS, x, out, batch, cache, buffers_of(block, n))
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)


def test_attention_hands_its_sinks_and_window_to_the_op():
    """One key of value 1 per head, so that the output is the share which the sink leaves it."""
    heads, head_dim = 2, 4
    q, k, v = (linear(heads * head_dim)[0] for _ in range(3))
    o, _ = linear(heads * head_dim, heads * head_dim)
    for proj in (q, k):
        proj.weight.data.zero_()
    v.weight.data.zero_()
    v = Linear(weight=v.weight, bias=torch.ones(heads * head_dim))
    rope = Rope.build(RopeConfig(theta=100.0, rotary_dim=head_dim), max_positions=3)
    block = GroupedQueryAttention(
        q_proj=q, k_proj=k, v_proj=v, o_proj=o, rope=rope, heads=heads, kv_heads=heads,
        head_dim=head_dim, window=2, sinks=torch.tensor([0.0, 3.0]),
    )  # fmt: skip
    batch = Batch.allocate(tokens=3, slots=1, pages_per_slot=1, logits=1)
    batch.positions.copy_(torch.arange(3))
    batch.counts[0] = 3
    cache = allocate_kv(
        pages=1, page_size=16, kv_heads=heads, head_dim=head_dim, dtype=torch.float32
    )
    buffers, x = buffers_of(block, 3), torch.randn(3, HIDDEN)
    block.forward(OPS, x, torch.zeros(3, heads * head_dim), batch, cache, buffers)
    mixed = buffers[Scratch("attention.mixed", heads * head_dim)]
    for t, seen in enumerate((1, 2, 2)):
        shares = seen / (seen + torch.tensor([0.0, 3.0]).exp())
        torch.testing.assert_close(mixed[t], shares.repeat_interleave(head_dim))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kv_cache_layout(dtype: torch.dtype):
    cache = allocate_kv(pages=3, page_size=32, kv_heads=2, head_dim=10, dtype=dtype)
    assert cache.k.shape == (3, 2, 2, 10, 16) and cache.v.shape == (3, 2, 32, 10)
    assert (cache.pages, cache.kv_heads, cache.page_size, cache.head_dim) == (3, 2, 32, 10)
    assert cache.k.dtype == cache.v.dtype == dtype
    assert not cache.k.any() and not cache.v.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 24}, "page size 24"),
        ({"page_size": 0}, "page size 0"),
        ({"pages": 0}, "0 pages"),
        ({"dtype": torch.float64}, "torch.float64"),
    ],
)
def test_kv_cache_refuses(change: dict, message: str):
    sizes = {"pages": 1, "page_size": 16, "kv_heads": 1, "head_dim": 4, "dtype": torch.float32}
    with pytest.raises(InvalidRequest, match=message):
        allocate_kv(**{**sizes, **change})


def test_decoder_refuses_a_batch_larger_than_its_buffers():
    proj, _ = linear(7)
    decoder = Decoder(
        embedding=Embedding(weight=proj.weight),
        layers=[],
        head=LanguageModelHead(norm=RMSNorm(weight=torch.ones(HIDDEN), eps=1e-6), proj=proj),
        hidden_size=HIDDEN,
        vocab_size=7,
    )
    buffers = decoder.allocate_buffers(tokens=4, logits=2)
    for tokens, logits in ((5, 2), (4, 3)):
        batch = Batch.allocate(tokens=tokens, slots=1, pages_per_slot=1, logits=logits)
        with pytest.raises(InvalidRequest, match=f"{tokens} tokens and {logits} logit rows"):
            decoder.forward(OPS, batch, [], buffers)
