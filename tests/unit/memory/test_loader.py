"""Loading: what is kept exactly, what is found and undone, and everything that can be wrong."""

import gguf
import numpy as np
import pytest
import torch
from tiny_checkpoints import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    MemoryCheckpoint,
    expert_tensors,
    experts,
    matrix,
    tiny_model,
    vector,
)

from moestro import formats
from moestro.core.errors import CheckpointError, UnsupportedFormat
from moestro.memory.loader import load_weights
from moestro.memory.policy import FormatPolicy

KEEP = FormatPolicy.parse("")


def load(checkpoint, *specs, policy=KEEP, progress=None):
    return load_weights(checkpoint, list(specs), policy=policy, progress=progress)


def quantized(source_type: str, rows: int, cols: int, seed: int = 0):
    """(checkpoint entry, its dequantized values) of random float weights in a GGUF type."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, cols)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[source_type]
    raw = gguf.quants.quantize(values, kind)
    back = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    return (source_type, (rows, cols), torch.from_numpy(raw).reshape(-1)), back


def test_a_whole_model_keeps_every_value():
    tensors, specs = tiny_model()
    weights = load(MemoryCheckpoint(tensors), *specs)
    assert set(weights) == {s.key for s in specs} - {"lm_head"}  # optional and absent
    assert weights["norm"].dtype == torch.float32
    assert torch.equal(weights["norm"], tensors["norm"].float())
    assert torch.equal(weights["layers.1.q"].unpack(), tensors["layers.1.q"].float())
    assert (
        weights["layers.1.q"].format_name == "bf16" and weights["layers.1.q"].name == "layers.1.q"
    )
    bank = weights["layers.1.experts"]
    for e in range(EXPERTS):
        for name, part in zip(("gate", "up", "down"), bank.expert(e), strict=True):
            assert torch.equal(part.unpack(), tensors[f"layers.1.experts.{e}.{name}"].float())


def test_progress_counts_every_source_byte_once():
    tensors, specs = tiny_model()
    calls = []
    load(
        MemoryCheckpoint(tensors), *specs, progress=lambda done, total: calls.append((done, total))
    )
    total = sum(t.nbytes for t in tensors.values())
    assert calls[0] == (0, total) and calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_the_first_source_that_is_there_is_taken():
    a, b = torch.randn(16, 32), torch.randn(16, 32)
    spec = matrix("q", 16, 32, sources=("absent", "b", "a"))
    assert torch.equal(load(MemoryCheckpoint({"a": a, "b": b}), spec)["q"].unpack(), b)


def test_quantized_weights_are_kept_exactly_and_only_requantized_on_request():
    entry, values = quantized("Q8_0", 32, 64)
    checkpoint = MemoryCheckpoint({"q": entry}, "gguf")
    spec = matrix("q", 32, 64)
    kept = load(checkpoint, spec)["q"]
    assert kept.format_name == "int8-g32" and torch.equal(kept.unpack(), values)
    other = load(checkpoint, spec, policy=FormatPolicy.parse("int4-g32"))["q"]
    assert other.format_name == "int4-g32"
    assert 0 < float((other.unpack() - values).abs().max()) < 0.5
    wide = load(checkpoint, spec, policy=FormatPolicy.parse("f32"))["q"]
    assert torch.equal(wide.unpack(), values)


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_of_one_tensor_each_or_stacked(stacked):
    singles = expert_tensors()
    tensors = singles
    if stacked:
        tensors = {
            f"layers.0.experts.{name}_stack": torch.stack(
                [singles[f"layers.0.experts.{e}.{name}"] for e in range(EXPERTS)]
            )
            for name in ("gate", "up", "down")
        }
    bank = load(MemoryCheckpoint(tensors), experts())["layers.0.experts"]
    assert bank.num_experts == EXPERTS
    for e in range(EXPERTS):
        for name, part in zip(("gate", "up", "down"), bank.expert(e), strict=True):
            assert torch.equal(part.unpack(), singles[f"layers.0.experts.{e}.{name}"].float())


@pytest.mark.parametrize("stacked", [False, True])
def test_fused_gate_and_up_have_gate_first(stacked):
    singles = expert_tensors()
    pairs = [
        torch.cat([singles[f"layers.0.experts.{e}.{n}"] for n in ("gate", "up")])
        for e in range(EXPERTS)
    ]
    downs = {k: v for k, v in singles.items() if k.endswith("down")}
    if stacked:
        tensors, name = {"gate_up": torch.stack(pairs), **downs}, "gate_up"
    else:
        tensors = {**{f"pair.{e}": p for e, p in enumerate(pairs)}, **downs}
        name = "pair.{e}"
    checkpoint = MemoryCheckpoint(tensors)
    spec = experts(gate_up=(name,), down=("layers.0.experts.{e}.down",))
    bank = load(checkpoint, spec)["layers.0.experts"]
    for e in range(EXPERTS):
        for part_name, part in zip(("gate", "up", "down"), bank.expert(e), strict=True):
            assert torch.equal(part.unpack(), singles[f"layers.0.experts.{e}.{part_name}"].float())
    assert checkpoint.reads.count("gate_up" if stacked else "pair.0") == (EXPERTS if stacked else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_transposed_experts_with_alternating_gate_and_up(dtype):
    generator = torch.Generator().manual_seed(5)
    pair = torch.randn(EXPERTS, HIDDEN, 2 * INTERMEDIATE, generator=generator).to(dtype)
    down = torch.randn(EXPERTS, INTERMEDIATE, HIDDEN, generator=generator).to(dtype)
    tensors = {"pair": pair, "down": down}
    if dtype == torch.float64:
        tensors = {k: ("F64", tuple(v.shape), v.view(-1).view(torch.uint8)) for k, v in
                   tensors.items()}  # fmt: skip
    spec = experts(gate_up=("pair",), down=("down",), layout="interleaved_transposed",
                   activation="gelu")  # fmt: skip
    policy = FormatPolicy.parse("f32" if dtype == torch.float64 else "")
    bank = load(MemoryCheckpoint(tensors), spec, policy=policy)["layers.0.experts"]
    assert bank.activation == "gelu"
    for e in range(EXPERTS):
        got = [part.unpack() for part in bank.expert(e)]
        want = [pair[e, :, ::2].T, pair[e, :, 1::2].T, down[e].T]
        assert all(torch.equal(g, w.float()) for g, w in zip(got, want, strict=True))


def test_transposed_experts_are_checked():
    spec = experts(gate_up=("pair",), down=("down",), layout="interleaved_transposed")
    pair = torch.zeros(EXPERTS, HIDDEN, 2 * INTERMEDIATE)
    with pytest.raises(CheckpointError, match=r"lacks 2 tensors that the model needs: pair, down"):
        load(MemoryCheckpoint({"x": pair}), spec)
    rows = {"pair": pair.mT.contiguous(), "down": torch.zeros(EXPERTS, INTERMEDIATE, HIDDEN)}
    with pytest.raises(CheckpointError, match=r"pair should be \[3, 64, 64\] but is \[3, 65, 64\]"):
        load(MemoryCheckpoint({**rows, "pair": torch.zeros(EXPERTS, 65, 64)}), spec)
    blocks = ("Q8_0", (EXPERTS, HIDDEN, 2 * INTERMEDIATE), torch.zeros(0, dtype=torch.uint8))
    with pytest.raises(UnsupportedFormat, match=r"pair holds transposed experts of type Q8_0"):
        load(MemoryCheckpoint({**rows, "pair": blocks}), spec)


def test_a_bank_of_one_expert_may_come_without_its_stacking_axis():
    singles = {f"only.{n}": v for n, v in zip(("gate", "up", "down"), expert_tensors().values(),
                                              strict=False)}  # fmt: skip
    spec = experts(count=1, gate=("only.gate",), up=("only.up",), down=("only.down",))
    bank = load(MemoryCheckpoint(singles), spec)["layers.0.experts"]
    assert torch.equal(bank.expert(0)[2].unpack(), singles["only.down"].float())


def test_down_may_have_another_type_than_gate_and_up():
    tensors = {}
    values = {}
    for name, kind, shape in (("gate", "Q4_0", (EXPERTS * INTERMEDIATE, HIDDEN)),
                              ("up", "Q4_0", (EXPERTS * INTERMEDIATE, HIDDEN)),
                              ("down", "Q8_0", (EXPERTS * HIDDEN, INTERMEDIATE))):  # fmt: skip
        (dtype, _, raw), values[name] = quantized(kind, *shape)
        stack = (EXPERTS, shape[0] // EXPERTS, shape[1])
        tensors[f"layers.0.experts.{name}_stack"] = (dtype, stack, raw)
    bank = load(MemoryCheckpoint(tensors, "gguf"), experts())["layers.0.experts"]
    names = [part.format_name for part in bank.projections]
    assert names == ["int4-g32", "int4-g32", "int8-g32"]
    for e in range(EXPERTS):
        got = bank.expert(e)[2].unpack()
        assert torch.equal(got, values["down"].view(EXPERTS, HIDDEN, INTERMEDIATE)[e])


def test_experts_of_one_projection_with_different_types_need_a_named_format():
    tensors = expert_tensors()
    tensors["layers.0.experts.1.up"] = tensors["layers.0.experts.1.up"].float()
    with pytest.raises(UnsupportedFormat, match=r"experts\.up.*different types \(BF16, F32\)"):
        load(MemoryCheckpoint(tensors), experts())
    policy = FormatPolicy.parse("experts=f32")
    assert load(MemoryCheckpoint(tensors), experts(), policy=policy)


@pytest.mark.parametrize("source_type", ["F32", "Q8_0"])
def test_interleaved_gguf_rows_are_put_back(source_type):
    """GGUF holds q/k rows of llama-family models with the two halves of each head interleaved."""
    heads, head_dim, cols = 3, 16, 64
    original = torch.randn(heads * head_dim, cols)
    if source_type != "F32":
        kind = gguf.GGMLQuantizationType[source_type]
        raw = gguf.quants.quantize(original.numpy(), kind)
        original = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    # What llama.cpp's converter does, row by row.
    order = [h * head_dim + half * (head_dim // 2) + i
             for h in range(heads) for i in range(head_dim // 2) for half in (0, 1)]  # fmt: skip
    permuted = original[order]
    if source_type == "F32":
        entry = permuted
    else:
        raw = torch.from_numpy(gguf.quants.quantize(permuted.numpy(), kind)).reshape(-1)
        entry = (source_type, tuple(permuted.shape), raw)
    spec = matrix("q", heads * head_dim, cols, unpermute_heads=heads)
    bias = vector("bias", heads * head_dim, unpermute_heads=heads)
    loaded = load(
        MemoryCheckpoint({"q": entry, "bias": permuted[:, 0].clone()}, "gguf"), spec, bias
    )
    assert torch.equal(loaded["q"].unpack(), original)
    assert torch.equal(loaded["bias"], original[:, 0])
    untouched = load(MemoryCheckpoint({"q": permuted, "bias": permuted[:, 0].clone()}), spec, bias)
    assert torch.equal(untouched["q"].unpack(), permuted)


def test_head_counts_that_do_not_divide_the_rows_are_refused():
    checkpoint = MemoryCheckpoint({"q": torch.zeros(48, 64)}, "gguf")
    with pytest.raises(CheckpointError, match=r"q has 48 rows.*5 heads"):
        load(checkpoint, matrix("q", unpermute_heads=5))


def test_axes_of_length_one_do_not_matter():
    loaded = load(MemoryCheckpoint({"gate": torch.ones(64)}), matrix("gate", 1, 64))
    assert loaded["gate"].rows == 1 and torch.equal(loaded["gate"].unpack(), torch.ones(1, 64))


def test_missing_tensors_are_listed_first_names_first():
    specs = [matrix(f"layers.{i}.q") for i in range(12)]
    with pytest.raises(CheckpointError, match=r"lacks 12 tensors.*layers\.0\.q, .* and 4 more"):
        load(MemoryCheckpoint({"x": torch.zeros(1)}), *specs)


@pytest.mark.parametrize("gone", ["layers.0.experts.1.up", "layers.0.experts.2.down"])
def test_one_missing_expert_is_named(gone):
    tensors = expert_tensors()
    del tensors[gone]
    with pytest.raises(CheckpointError, match=rf"lacks 1 tensors that the model needs: {gone}"):
        load(MemoryCheckpoint(tensors), experts())


def test_a_projection_that_is_missing_altogether_is_named_with_its_alternatives():
    tensors = {k: v for k, v in expert_tensors().items() if not k.endswith("up")}
    with pytest.raises(CheckpointError, match=r"layers\.0\.experts\.0\.up \(or .*up_stack\)"):
        load(MemoryCheckpoint(tensors), experts())


def test_more_experts_than_the_configuration_says():
    with pytest.raises(CheckpointError, match=r"says 2 experts, but layers\.0\.experts\.2\.gate"):
        load(MemoryCheckpoint(expert_tensors()), experts(count=2))


def test_fewer_stacked_experts_than_the_configuration_says():
    names = ("gate", "up", "down")
    tensors = {f"layers.0.experts.{n}_stack": torch.zeros(2, INTERMEDIATE, HIDDEN) for n in names}
    with pytest.raises(CheckpointError, match="says 3 experts, the tensor holds 2"):
        load(MemoryCheckpoint(tensors), experts())


@pytest.mark.parametrize(
    ("name", "shape"),
    [("q", (48, 65)), ("q", (64, 48)), ("norm", (63,)), ("layers.0.experts.0.down", (32, 64))],
)
def test_wrong_shapes_say_expected_and_found(name, shape):
    tensors = {"q": torch.zeros(48, 64), "norm": torch.zeros(64), **expert_tensors()}
    tensors[name] = torch.zeros(shape)
    message = rf"{name} should be \[.*\] but is \[{', '.join(map(str, shape))}\]"
    with pytest.raises(CheckpointError, match=message):
        load(MemoryCheckpoint(tensors), matrix("q"), vector("norm"), experts())


@pytest.mark.parametrize("name", ["q", "norm", "layers.0.experts.2.up"])
@pytest.mark.parametrize("policy", ["", "int4-g32"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_weights_name_the_tensor(name, policy, bad):
    tensors = {"q": torch.zeros(48, 64), "norm": torch.zeros(64), **expert_tensors()}
    tensors[name].view(-1)[5] = bad
    with pytest.raises(CheckpointError, match=rf"{name}: 1 of \d+ weights are not finite"):
        load(
            MemoryCheckpoint(tensors), matrix("q"), vector("norm"), experts(),
            policy=FormatPolicy.parse(policy),
        )  # fmt: skip


@pytest.mark.parametrize("policy", ["", "int4-g32"])
@pytest.mark.parametrize("spec", [matrix("q", 1, 256), vector("q", 256)])
def test_types_that_are_not_read_are_named_with_their_tensor_before_anything_is_read(policy, spec):
    entry = ("Q1_0", (1, 256), torch.zeros(36, dtype=torch.uint8))
    checkpoint = MemoryCheckpoint({"q": entry}, "gguf")
    with pytest.raises(UnsupportedFormat, match="q: weight type Q1_0 is not supported"):
        load(checkpoint, spec, policy=FormatPolicy.parse(policy))
    assert checkpoint.reads == []


def test_a_factor_beside_a_matrix_is_refused_by_name_in_gguf_files_alone():
    tensors = {"q.weight": torch.ones(48, 64), "q.scale": torch.full((1,), 0.5)}
    spec = matrix("q", sources=("q.weight",))
    with pytest.raises(UnsupportedFormat, match=r"q\.weight is to be multiplied by q\.scale"):
        load(MemoryCheckpoint(tensors, "gguf"), spec)
    assert torch.equal(load(MemoryCheckpoint(tensors), spec)["q"].unpack(), tensors["q.weight"])


def test_points_of_a_grid_are_kept_exactly_and_only_requantized_on_request():
    kind = gguf.GGMLQuantizationType.IQ2_XS
    raw = np.random.default_rng(0).integers(0, 256, (32, 2 * 74), dtype=np.uint8)
    raw.reshape(32, 2, 74)[:, :, :2] = np.array([0.25], dtype=np.float16).view(np.uint8)
    values = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    checkpoint = MemoryCheckpoint(
        {"q": ("IQ2_XS", (32, 512), torch.from_numpy(raw).reshape(-1))}, "gguf"
    )
    spec = matrix("q", 32, 512)
    kept = load(checkpoint, spec)["q"]
    assert kept.format_name == "iq2xs" and torch.equal(kept.unpack(), values)
    wide = load(checkpoint, spec, policy=FormatPolicy.parse("f32"))["q"]
    assert torch.equal(wide.unpack(), values)
    with pytest.raises(UnsupportedFormat, match=r"q: format iq2xxs cannot hold IQ2_XS"):
        load(checkpoint, spec, policy=FormatPolicy.parse("iq2xxs"))
    assert formats.get("iq2xs").nbytes(32, 512) < 1.06 * raw.size


def test_nothing_is_read_when_a_later_tensor_is_missing():
    checkpoint = MemoryCheckpoint({"q": torch.zeros(48, 64)})
    with pytest.raises(CheckpointError, match="norm"):
        load(checkpoint, matrix("q"), vector("norm"))
    assert checkpoint.reads == []


def test_a_big_matrix_is_quantized_in_slabs_with_the_same_bytes(monkeypatch):
    weight = torch.randn(100, 64)
    policy = FormatPolicy.parse("int4-g32")
    whole = load(MemoryCheckpoint({"q": weight}), matrix("q", 100), policy=policy)["q"]
    monkeypatch.setattr("moestro.memory.packing._SLAB_ELEMENTS", 64 * 32)
    slabs = load(MemoryCheckpoint({"q": weight}), matrix("q", 100), policy=policy)["q"]
    assert torch.equal(whole.data, slabs.data)
