"""Whole tiny models in quantized checkpoints, against transformers on the decoded weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import model_logits
import pytest
import tiny_checkpoint
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import slow_microscaling as mx
import slow_quantizers as slow
from moestro import LLM, SamplingParams, models
from moestro.checkpoints import open_checkpoint
from moestro.core.errors import CheckpointError, UnsupportedFormat
from moestro.memory.convert import convert
from moestro.models import Model

SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
                "num_key_value_heads": 2, "num_local_experts": 3,
                "max_position_embeddings": 512},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 96, "num_experts": 3,
                  "mlp_only_layers": [1], "intermediate_size": 96,
                  "max_position_embeddings": 512},
}  # fmt: skip
QUANTIZED = re.compile(r".*(_proj|\.w[123])\.weight$")
EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:.*\.)?experts\.(?:(\d+)\.)?(\w+?)(?:\.weight)?$")
IDS = torch.randint(101, (40,), generator=torch.Generator().manual_seed(5)).tolist()


Stored = slow.Quantized | slow.Floats8 | mx.TwoLevels


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a matrix is stored: its decoder and its tensors, or None to keep it in floating point.

    is_float: kernels do not round the activations that meet it to bytes.
    """

    declared: dict[str, Any]
    store: Callable[[str, Tensor], tuple[Stored, dict[str, Tensor]] | None]
    is_float: bool = False


def gptq(bits: int, group: int, symmetric: bool, version: int, **more: Any) -> Method:
    def store(name: str, weight: Tensor):
        q = slow.quantize(weight, bits=bits, group=group, symmetric=symmetric)
        return q, slow.gptq(q, version=version)

    config = slow.gptq_config(bits=bits, group=group, symmetric=symmetric, version=version)
    return Method(declared=config | more, store=store)


def mixed_gptq() -> Method:
    """8 bits for down projections, attention in floating point."""
    rest, down = gptq(4, 64, True, 1), gptq(8, 32, True, 1)
    dynamic = {
        r"+:.*(down_proj|w2)$": {"bits": 8, "group_size": 32},
        r"-:.*self_attn.*": {},
    }

    def store(name: str, weight: Tensor):
        if "self_attn" in name:
            return None
        return (down if re.match(r".*(down_proj|w2)", name) else rest).store(name, weight)

    return Method(declared={**rest.declared, "dynamic": dynamic}, store=store)


def gptq_shuffled(bits: int, group: int, symmetric: bool) -> Method:
    """In activation order, which is that of the input: gate and up of an expert have the same."""

    def store(name: str, weight: Tensor):
        seed = re.sub(r"gate_proj|up_proj|w[13]", "gate and up", name)
        q = slow.quantize_shuffled(weight, seed, bits=bits, group=group, symmetric=symmetric)
        return q, slow.gptq(q)

    config = slow.gptq_config(bits=bits, group=group, symmetric=symmetric) | {"desc_act": True}
    return Method(declared=config, store=store)


def awq(group: int) -> Method:
    def store(name: str, weight: Tensor):
        q = slow.quantize(weight, bits=4, group=group, symmetric=False)
        return q, slow.awq(q)

    return Method(declared=slow.awq_config(group=group), store=store)


def compressed(bits: int, group: int, symmetric: bool) -> Method:
    def store(name: str, weight: Tensor):
        q = slow.quantize(weight, bits=bits, group=group, symmetric=symmetric)
        tensors = slow.compressed(q, symmetric=symmetric, scale_type=torch.float16)
        return q, tensors

    config = slow.compressed_config(bits=bits, group=group, symmetric=symmetric)
    return Method(declared=config, store=store)


def grouped_compressed() -> Method:
    """Experts in 4 bits with zero points, attention in rows of 8-bit bytes."""

    def store(name: str, weight: Tensor):
        if "self_attn" in name:
            q = slow.quantize(weight, bits=8, group=-1, symmetric=True)
            return q, slow.signed_bytes(q, scale_type=torch.float16)
        q = slow.quantize(weight, bits=4, group=32, symmetric=False)
        return q, slow.compressed(q, symmetric=False, packed_zeros=False, scale_type=torch.float16)

    groups = {
        "experts": {
            "targets": ["Linear"],
            "format": "pack-quantized",
            "weights": slow.weights_config(bits=4, group=32, symmetric=False),
        },
        "attention": {
            "targets": ["re:.*self_attn.*"],
            "format": "int-quantized",
            "weights": slow.weights_config(bits=8, group=-1, symmetric=True),
        },
    }
    config = slow.compressed_config(bits=4, group=32, symmetric=False, format="mixed-precision")
    return Method(declared={**config, "config_groups": groups}, store=store)


def nvfp4() -> Method:
    def store(name: str, weight: Tensor):
        q = mx.quantize_two_levels(weight)
        return q, q.tensors("weight", "weight_scale_2", q.factor)

    return Method(declared=mx.MODELOPT_NVFP4, store=store)


def fp8(block: tuple[int, int] | None) -> Method:
    declared: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3"}
    declared["weight_block_size"] = list(block) if block else None

    def store(name: str, weight: Tensor):
        q = slow.quantize_floats8(weight, block=block or (10**6, 10**6))
        scale = "weight_scale_inv" if block else "weight_scale"
        return q, q.tensors(scale, torch.float32)

    return Method(declared=declared, store=store, is_float=True)


def float_channels() -> Method:
    """compressed-tensors, experts in 4 bits."""
    experts = compressed(4, 32, True)
    groups = {
        **experts.declared["config_groups"],
        "attention": {
            "targets": ["re:.*self_attn.*"],
            "format": "float-quantized",
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        },
    }

    def store(name: str, weight: Tensor):
        if "self_attn" not in name:
            return experts.store(name, weight)
        q = slow.quantize_floats8(weight, block=(1, 10**6))
        return q, q.tensors("weight_scale", torch.float32)

    return Method(declared={**experts.declared, "config_groups": groups}, store=store)


METHODS: dict[str, Method] = {
    "gptq-4-sym-32": gptq(4, 32, True, 1),
    "gptq-4-asym-64-v1": gptq(4, 64, False, 1),
    "gptq-4-asym-32-v2": gptq(4, 32, False, 2),
    "gptq-4-row": gptq(4, -1, True, 1, desc_act=True),
    "gptq-4-shuffled": gptq_shuffled(4, 32, False),
    "gptq-8-shuffled": gptq_shuffled(8, 32, True),
    "gptq-8-128": gptq(8, 128, True, 2),
    "gptq-8-asym-64": gptq(8, 64, False, 1),
    "gptq-mixed": mixed_gptq(),
    "awq-32": awq(32),
    "awq-row": awq(-1),
    "compressed-4-32": compressed(4, 32, True),
    "compressed-4-64-zero": compressed(4, 64, False),
    "compressed-8-row": compressed(8, -1, True),
    "compressed-groups": grouped_compressed(),
    "compressed-floats": float_channels(),
    "nvfp4": nvfp4(),
    "fp8-block": fp8((128, 128)),
    "fp8-small-block": fp8((16, 32)),
    "fp8-tensor": fp8(None),
}


@dataclass(frozen=True)
class Written:
    """A quantized checkpoint on disk and transformers' logits on its decoded weights.

    rounded: with the inputs of quantized matrices rounded to 8 bits, as the kernels do, each 32
    channels that lie side by side once they are in the order of their groups.
    """

    path: Path
    expected: Tensor
    rounded: Tensor


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Written]:
    made: dict[tuple[str, str], Written] = {}

    def get(family: str, method: str) -> Written:
        key = family, method
        if key not in made:
            made[key] = write(family, METHODS[method], tmp_path_factory.mktemp(method))
        return made[key]

    return get


def write(family: str, method: Method, folder: Path) -> Written:
    model = tiny_models.make(family, seed=3, **SIZES[family])
    decoded = tiny_models.write_safetensors(model, folder / "decoded")
    tensors = load_file(decoded / "model.safetensors")
    stored: dict[str, Tensor] = {}
    orders: dict[str, list[int]] = {}
    for name, weight in list(tensors.items()):
        kept = method.store(name, weight) if QUANTIZED.match(name) else None
        if kept is None:
            stored[name] = weight
            continue
        q, parts = kept
        tensors[name] = q.floats()
        if not isinstance(q, slow.Floats8):
            orders[input_of(name)] = sorted(range(q.cols), key=q.channel_groups.__getitem__)
        stored |= {f"{name.removesuffix('.weight')}.{part}": t for part, t in parts.items()}
    save_file(tensors, decoded / "model.safetensors", metadata={"format": "pt"})
    path = folder / "quantized"
    path.mkdir()
    save_file(stored, path / "model.safetensors")
    config = json.loads((decoded / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps({**config, "quantization_config": method.declared})
    )
    reference = AutoModelForCausalLM.from_pretrained(
        decoded, attn_implementation="eager", experts_implementation="eager"
    ).float()
    expected, rounded = reference_logits(reference.eval(), orders)
    return Written(path, expected, rounded)


def input_of(name: str, expert: int = 0) -> str:
    """A name for the input of a matrix, the same for an expert's tensors as for one of the stacked
    parameters that transformers makes of them.
    """
    found = EXPERT.match(name)
    if found is None:
        return name
    layer, number, projection = found.groups()
    which = "down" if projection in ("down_proj", "w2") else "gate and up"
    return f"layer {layer}, expert {number or expert}: {which}"


def round_activations(x: Tensor, order: list[int]) -> Tensor:
    """To signed 8-bit codes, each 32 channels of a token in that order by a scale of their own."""
    blocks = x[..., order].reshape(*x.shape[:-1], -1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scale > 0, blocks / scale, 0.0).round()
    rounded = torch.empty_like(x)
    rounded[..., order] = (codes * scale).reshape(x.shape)
    return rounded


def reference_logits(model: PreTrainedModel, orders: dict[str, list[int]]) -> tuple[Tensor, Tensor]:
    """Logits as they are, and with the inputs rounded that have an order."""
    stored = {
        matrix.data_ptr(): orders[input_of(name, expert)]
        for name, weight in model.named_parameters()
        for expert, matrix in enumerate(weight if weight.dim() == 3 else [weight])
        if input_of(name, expert) in orders
    }
    linear, met = torch.nn.functional.linear, set[int]()

    def rounding(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.data_ptr() in stored:
            met.add(weight.data_ptr())
            x = round_activations(x, stored[weight.data_ptr()])
        return linear(x, weight, bias)

    ids = torch.tensor([IDS])
    with torch.no_grad():
        expected = model(ids).logits[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "linear", rounding)
            rounded = model(ids).logits[0]
    assert met == stored.keys() and len(met) == len(orders)
    return expected, rounded


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


CASES = [(family, method) for family in SIZES for method in METHODS]


@pytest.mark.parametrize(("family", "method"), CASES)
def test_logits_are_those_of_the_decoded_weights(
    family: str, method: str, written: Callable[[str, str], Written]
):
    made = written(family, method)
    model = model_logits.load(made.path, device="reference")
    got = model_logits.sequence_logits(model, IDS)
    error = (got - made.expected).abs().max() / made.expected.abs().max()
    assert error <= 1e-4


def plain_logits(model: Model) -> Tensor:
    """On the kernels that round no activation of a float format."""
    native = pytest.importorskip("moestro.native")
    before = native.isa()
    native.set_isa("scalar")
    try:
        return model_logits.sequence_logits(model, IDS)
    finally:
        native.set_isa(before)


@pytest.mark.parametrize(("family", "method"), CASES)
def test_kernels_differ_by_the_rounding_of_activations_alone(
    family: str, method: str, written: Callable[[str, str], Written]
):
    made = written(family, method)
    try:
        model = model_logits.load(made.path, device="cpu")
    except ImportError as error:
        pytest.skip(f"the native extension is not built: {error}")
    # Some instruction sets round activations of 8-bit and 16-bit floats to bfloat16.
    assert relative_error(model_logits.sequence_logits(model, IDS), made.rounded) <= 0.05
    got = plain_logits(model)
    # A number at the edge of two codes may go either way, which changes few tokens.
    errors = (got - made.rounded).norm(dim=1) / made.rounded.norm(dim=1)
    if METHODS[method].is_float:
        assert torch.equal(made.expected, made.rounded)
        assert errors.max() <= 1e-4
        return
    assert relative_error(made.expected, made.rounded) > 0.01
    assert errors.median() <= 1e-3
    assert errors.max() <= 0.05


@pytest.mark.parametrize(
    ("method", "held_in"),
    [
        ("gptq-4-asym-64-v1", {"int4z-g64"}),
        ("gptq-4-shuffled", {"int4z-g32"}),
        ("gptq-8-asym-64", {"int8z-g64"}),
        ("awq-32", {"int4z-g32"}),
        ("compressed-groups", {"int4z-g32"}),
        ("nvfp4", {"nvfp4s"}),
    ],
)
def test_a_converted_model_has_the_same_weights(
    method: str, held_in: set[str], written: Callable[[str, str], Written], tmp_path: Path
):
    made = written("qwen3_moe", method)
    with open_checkpoint(made.path) as source:
        report = convert(source, models.describe(source).weights, tmp_path / "packed")
    quantized = [w for w in report.weights if re.search("experts|mlp|_proj", w.key)]
    assert len(quantized) > 8
    assert all(weight.relative_error == 0 for weight in quantized)
    experts = [w for w in quantized if "experts" in w.key and not w.key.endswith("input_order")]
    assert {w.format for w in experts} == held_in
    direct, packed = (
        model_logits.sequence_logits(
            model_logits.load(path, device="reference", formats=formats), IDS
        )
        for path, formats in (
            (made.path, "embedding=int4-g32,lm_head=int4-g32"),
            (tmp_path / "packed", ""),
        )
    )
    assert torch.equal(direct, packed)


def test_gate_and_up_in_different_orders_are_refused(
    written: Callable[[str, str], Written], tmp_path: Path
):
    made = written("mixtral", "gptq-4-shuffled")
    tensors = load_file(made.path / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w3.g_idx"
    tensors[name] = tensors[name].roll(1)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((made.path / "config.json").read_text())
    with pytest.raises(
        UnsupportedFormat, match=r"layers\.1\.experts: gate and up of expert 2 .*--format"
    ):
        model_logits.load(tmp_path, device="reference")
    # In another format there is no order to follow.
    model_logits.load(tmp_path, device="reference", formats="experts=f32")


def test_a_missing_expert_is_named(written: Callable[[str, str], Written], tmp_path: Path):
    made = written("mixtral", "awq-32")
    tensors = load_file(made.path / "model.safetensors")
    expert = "model.layers.1.block_sparse_moe.experts.2.w3"
    for part in ("qweight", "scales", "qzeros"):
        tensors.pop(f"{expert}.{part}")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((made.path / "config.json").read_text())
    with pytest.raises(CheckpointError, match=f"{re.escape(expert)}.weight"):
        model_logits.load(tmp_path, device="reference")


def test_one_experts_scales_elsewhere_are_named(
    written: Callable[[str, str], Written], tmp_path: Path
):
    made = written("mixtral", "gptq-4-sym-32")
    tensors = load_file(made.path / "model.safetensors")
    del tensors["model.layers.0.block_sparse_moe.experts.1.w2.scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((made.path / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"experts\.1\.w2\.scales is missing"):
        open_checkpoint(tmp_path)


def test_text_is_generated_from_a_quantized_checkpoint(tmp_path: Path):
    """Through the engine: the same text as from a float checkpoint of the decoded weights."""
    method = METHODS["gptq-4-sym-32"]
    decoded, quantized = (tiny_checkpoint.write(tmp_path / name) for name in ("float", "gptq"))
    floats = load_file(decoded / "model.safetensors")
    stored = dict(floats)
    for name in [name for name in floats if "experts" in name]:
        kept = method.store(name, stored.pop(name))
        assert kept is not None
        q, parts = kept
        floats[name] = q.floats()
        stored |= {f"{name.removesuffix('.weight')}.{part}": t for part, t in parts.items()}
    save_file(floats, decoded / "model.safetensors")
    save_file(stored, quantized / "model.safetensors")
    tiny_models.change_config(quantized, quantization_config=method.declared)
    answers = []
    for path in (decoded, quantized):
        with LLM(path, device="reference", threads=1, context=64) as llm:
            chosen = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
            answers.append(llm.generate("hello", chosen)[0].token_ids)
    assert len(answers[0]) == 8
    assert answers[0] == answers[1]
