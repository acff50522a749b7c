"""Models with latent attention in the layouts they are published in, against transformers on the
decoded weights: FP8 in blocks as DeepSeek writes it, and INT4 experts as Kimi-K2-Thinking has them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_logits
import pytest
import test_quantized_checkpoints as quantized
import tiny_checkpoint
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import slow_quantizers as slow
from moestro import LLM, SamplingParams, models
from moestro.checkpoints import open_checkpoint
from moestro.memory.convert import convert

IDS = quantized.IDS
SIZES: dict[str, Any] = {
    "hidden_size": 192, "moe_intermediate_size": 32, "intermediate_size": 64, "n_group": 2,
    "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2,
    "num_attention_heads": 5, "num_key_value_heads": 5, "qk_nope_head_dim": 16,
    "max_position_embeddings": 512,
}  # fmt: skip
#: as in config.json of DeepSeek-V3
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
#: as in config.json of Kimi-K2-Thinking; the router is not a module of the class that is targeted
INT4 = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}

Store = Callable[[str, Tensor], tuple[Tensor, dict[str, Tensor]] | None]


def fp8_blocks(name: str, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]] | None:
    """All matrices but embeddings, router and head."""
    if weight.dim() != 2 or re.search(r"(embed_tokens|mlp\.gate|lm_head|eh_proj)\.weight$", name):
        return None
    q = slow.quantize_floats8(weight, block=(128, 128))
    return q.floats(), q.tensors("weight_scale_inv", torch.float32)


def int4_experts(name: str, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]] | None:
    if ".mlp.experts." not in name:
        return None
    q = slow.quantize(weight, bits=4, group=32, symmetric=True)
    # Scales of eight significant bits, which bfloat16 holds.
    q.scales = [torch.tensor(row).bfloat16().tolist() for row in q.scales]
    return q.floats(), slow.compressed(q, symmetric=True, scale_type=torch.bfloat16)


def predicting_layer(tensors: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    """A further layer as published models have it: one more decoder layer with its own inputs."""
    last = f"model.layers.{layer - 1}."
    own = {
        f"model.layers.{layer}.{name.removeprefix(last)}": tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    hidden = tensors["model.norm.weight"]
    at = f"model.layers.{layer}"
    return own | {
        f"{at}.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{at}.enorm.weight": hidden.clone(),
        f"{at}.hnorm.weight": hidden.clone(),
        f"{at}.eh_proj.weight": torch.randn(len(hidden), 2 * len(hidden)),
        f"{at}.shared_head.norm.weight": hidden.clone(),
        f"{at}.shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }


def write_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Two files and their index."""
    names = sorted(tensors)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write(
    folder: Path, store: Store, declared: dict[str, Any], **changes: Any
) -> quantized.Written:
    """A quantized checkpoint, floats in bfloat16, and what transformers computes from the same."""
    model = tiny_models.make("deepseek_v3", seed=3, **SIZES)
    decoded = tiny_models.write_safetensors(model, folder / "decoded")
    floats = {
        name: tensor if name.endswith("bias") else tensor.bfloat16().float()
        for name, tensor in load_file(decoded / "model.safetensors").items()
    }
    layers = SIZES["num_hidden_layers"]
    stored: dict[str, Tensor] = {}
    for name, tensor in (floats | predicting_layer(floats, layers)).items():
        kept = store(name, tensor)
        if kept is None:
            stored[name] = tensor if name.endswith("bias") else tensor.bfloat16()
            continue
        value, parts = kept
        if name in floats:
            floats[name] = value
        stored |= {f"{name.removesuffix('.weight')}.{part}": t for part, t in parts.items()}
    save_file(floats, decoded / "model.safetensors", metadata={"format": "pt"})
    path = folder / "quantized"
    path.mkdir()
    write_shards(path, stored)
    config = json.loads((decoded / "config.json").read_text())
    changed = {**config, "num_nextn_predict_layers": 1, "quantization_config": declared, **changes}
    (path / "config.json").write_text(json.dumps(changed))
    reference = AutoModelForCausalLM.from_pretrained(
        decoded, attn_implementation="eager", experts_implementation="eager"
    ).float()
    routed = re.compile(r".*\.mlp\.experts\..*")  # not the shared ones
    orders = {
        quantized.input_of(name, expert): list(range(weight.shape[-1]))
        for name, weight in reference.named_parameters()
        if store is int4_experts and routed.match(name)
        for expert in range(len(weight))
    }
    logits = quantized.reference_logits(reference.eval(), orders)
    return quantized.Written(path, *logits)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> quantized.Written:
    return write(tmp_path_factory.mktemp("fp8"), fp8_blocks, FP8)


@pytest.fixture(scope="module")
def integers(tmp_path_factory: pytest.TempPathFactory) -> quantized.Written:
    return write(tmp_path_factory.mktemp("int4"), int4_experts, INT4, model_type="kimi_k2")


def largest_error(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def test_fp8_blocks(blocks: quantized.Written):
    model = model_logits.load(blocks.path, device="reference")
    assert largest_error(model_logits.sequence_logits(model, IDS), blocks.expected) <= 1e-4
    model = model_logits.load(blocks.path, device="cpu")
    assert largest_error(quantized.plain_logits(model), blocks.expected) <= 1e-4
    # Some instruction sets round activations of 8-bit floats to bfloat16.
    got = model_logits.sequence_logits(model, IDS)
    assert quantized.relative_error(got, blocks.expected) <= 0.05


def test_int4_experts(integers: quantized.Written):
    model = model_logits.load(integers.path, device="reference")
    assert model.spec.model_type == "kimi_k2"
    assert largest_error(model_logits.sequence_logits(model, IDS), integers.expected) <= 1e-4


def test_int4_experts_differ_by_the_rounding_of_activations_alone(integers: quantized.Written):
    model = model_logits.load(integers.path, device="cpu")
    got = quantized.plain_logits(model)
    errors = (got - integers.rounded).norm(dim=1) / integers.rounded.norm(dim=1)
    # One layer has experts: what is asserted below is well under the effect of rounding.
    assert quantized.relative_error(integers.expected, integers.rounded) > 0.005
    assert errors.median() <= 1e-3
    assert errors.max() <= 0.05


@pytest.mark.parametrize("name", ["blocks", "integers"])
def test_weights_keep_what_the_checkpoint_holds(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
):
    """Converted without a format: nothing is rounded, and no tensor of a further layer is used."""
    made = request.getfixturevalue(name)
    with open_checkpoint(made.path) as source:
        description = models.describe(source)
        specs = [s for s in description.weights if s.key not in ("embed_tokens", "lm_head")]
        report = convert(source, specs, tmp_path / "packed")
    formats = {w.key: w.format for w in report.weights}
    experts = "fp8-g128" if name == "blocks" else "int4-g32"
    attention = "fp8-g128" if name == "blocks" else "int4-g32"  # convert's own default for floats
    assert {formats[k] for k in formats if k.endswith(".experts")} == {experts}
    assert formats["layers.1.attention.o_proj"] == attention
    exact = [w for w in report.weights if name == "blocks" or w.key.endswith(".experts")]
    assert all(w.relative_error == 0 for w in exact)
    assert not any(w.key.startswith("layers.2") for w in report.weights)


@pytest.mark.parametrize("source_type", ["Q8_0", "Q5_1"])
def test_quantized_gguf_files(source_type: str, tmp_path: Path):
    """With the projections of keys and values in matrices of their own, as heads are stacked."""
    sizes = {**SIZES, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    reference = tiny_models.make("deepseek_v3", **sizes)
    path = tiny_models.write_quantized_gguf(reference, tmp_path / "model.gguf", source_type)
    with torch.no_grad():
        want = reference(torch.tensor([IDS])).logits[0]
    exact = model_logits.sequence_logits(model_logits.load(path, device="reference"), IDS)
    assert largest_error(exact, want) <= 1e-4


def test_bfloat16_checkpoints_with_a_half_precision_cache(tmp_path: Path):
    """KL to transformers in float32 on the same weights."""
    model = tiny_models.make("deepseek_v3", seed=4, **SIZES).bfloat16()
    path = tiny_models.write_safetensors(model, tmp_path / "model")
    with torch.no_grad():
        want = model.float()(torch.tensor([IDS])).logits[0].log_softmax(-1)
    built = model_logits.load(path, device="cpu")
    got = model_logits.sequence_logits(built, IDS, torch.float16).log_softmax(-1)
    divergence = (want.exp() * (want - got)).sum(-1)
    assert 0 < divergence.mean() <= 1e-3


def test_text_is_generated_by_the_engine(tmp_path: Path):
    """Greedy, with a prompt of several steps: the same whatever the step size and the device."""
    path = tiny_checkpoint.write(tmp_path / "model", family="deepseek_v3")
    sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    answers = []
    for device, tokens in (("reference", 64), ("cpu", 64), ("cpu", 8)):
        with LLM(
            path, device=device, threads=1, context=128, max_batch_tokens=tokens,
            kv_dtype="float32",
        ) as llm:  # fmt: skip
            answers.append(llm.generate("a prompt of thirty letters....", sampling)[0].token_ids)
    assert len(answers[0]) == 12
    assert answers[0] == answers[1] == answers[2]
