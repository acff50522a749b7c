"""gpt-oss with its experts in MXFP4, as it is published, against transformers' decoded weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import model_logits
import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import slow_microscaling as mx
from moestro import models
from moestro.checkpoints import open_checkpoint
from moestro.core.errors import CheckpointError
from moestro.memory.convert import convert
from moestro.memory.loader import load_weights
from moestro.memory.policy import FormatPolicy

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 3,
                         "max_position_embeddings": 512}  # fmt: skip
IDS = torch.randint(101, (40,), generator=torch.Generator().manual_seed(5)).tolist()
STACKS = ("gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """(published layout, the same weights decoded by transformers)."""
    folder = tmp_path_factory.mktemp("mxfp4")
    model = tiny_models.make("gpt_oss", seed=3, **SIZES)
    state = {k: v.contiguous() for k, v in model.state_dict().items()}
    stored = dict(state)
    for name in [n for n in state if n.endswith(STACKS)]:
        # A float stack is [E, K, N]; rows are what a scale belongs to.
        experts = [mx.quantize(one.T, bits=4) for one in state[name]]
        blocks, scales = mx.blocks(experts)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del stored[name]
        state[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert state[name].shape == model.state_dict()[name].shape
        for q, decoded in zip(experts, state[name], strict=True):
            assert torch.equal(q.floats(), decoded.T)
    published, decoded_path = folder / "published", folder / "decoded"
    for path, tensors in ((published, stored), (decoded_path, state)):
        path.mkdir()
        tensors = {k: v.contiguous() for k, v in tensors.items()}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        model.config.save_pretrained(path)
    declared = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}
    tiny_models.change_config(published, quantization_config=declared)
    yield published, decoded_path


def logits(path: Path, **options: Any) -> Tensor:
    return model_logits.sequence_logits(model_logits.load(path, **options), IDS)


def test_weights_are_those_of_transformers(written: tuple[Path, Path]):
    published, decoded = written
    banks = []
    for path in (published, decoded):
        with open_checkpoint(path) as checkpoint:
            specs = models.describe(checkpoint).weights
            banks.append(load_weights(checkpoint, specs, policy=FormatPolicy()))
    got, want = banks
    assert got.keys() == want.keys()
    for key in (k for k in got if k.endswith(".experts")):
        for n in range(3):
            for one, other in zip(*(bank[key].expert(n) for bank in banks), strict=True):
                assert (one.format_name, other.format_name) == ("mxfp4", "f32")
                assert torch.equal(one.unpack(), other.unpack())


def test_logits_are_those_of_the_decoded_weights(written: tuple[Path, Path]):
    published, decoded = written
    reference = AutoModelForCausalLM.from_pretrained(
        decoded, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        expected = reference.float().eval()(torch.tensor([IDS])).logits[0]
    got = logits(published, device="reference")
    assert (got - expected).abs().max() / expected.abs().max() <= 1e-4
    # Kernels round the activations that meet experts to 8 bits.
    native = logits(published, device="cpu")
    error = float((native - expected).norm() / expected.norm())
    assert 1e-5 < error < 0.05


def test_a_converted_model_is_the_same(written: tuple[Path, Path], tmp_path: Path):
    published, _ = written
    with open_checkpoint(published) as source:
        report = convert(source, models.describe(source).weights, tmp_path / "packed")
    experts = [w for w in report.weights if re.search(r"experts(\.gate|\.up|\.down)?$", w.key)]
    assert len(experts) in (2, 6)
    assert {w.format for w in experts} == {"mxfp4"}
    assert all(w.relative_error == 0 for w in experts)
    direct = logits(published, device="cpu", formats="embedding=int4-g32,lm_head=int4-g32,"
                    "attention=int4-g32")  # fmt: skip
    assert torch.equal(direct, logits(tmp_path / "packed", device="cpu"))


def test_a_number_of_experts_that_the_tensors_deny(written: tuple[Path, Path], tmp_path: Path):
    published, _ = written
    tensors = load_file(published / "model.safetensors")
    for name in [n for n in tensors if ".router." in n or n.endswith("proj_bias")]:
        tensors[name] = torch.cat([tensors[name], tensors[name][:1]])
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((published / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 4}))
    with pytest.raises(CheckpointError, match=r"says 4 experts, the tensor holds 3"):
        model_logits.load(tmp_path, device="reference")
