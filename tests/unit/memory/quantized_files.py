"""Checkpoints of one quantized module on disk, and the weight that is loaded from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_checkpoints import matrix
from torch import Tensor

import slow_quantizers as slow
from moestro.checkpoints import open_checkpoint
from moestro.checkpoints.safetensors import SafetensorsCheckpoint
from moestro.formats.base import PackedWeight
from moestro.memory.loader import load_weights
from moestro.memory.policy import FormatPolicy

#: groups that a weight format has, by those of checkpoints
GROUPS = {32: "g32", 64: "g64", 128: "g128", 256: "g128", 96: "g32", -1: "row"}


def write(folder: Path, tensors: dict[str, Tensor], declared: Any, module: str = "a.q_proj"):
    """A checkpoint with one module's tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {f"{module}.{part}": tensor for part, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    config = {"model_type": "tiny", "quantization_config": declared}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path, rows: int, cols: int, formats: str = "", module: str = "a.q_proj"):
    with open_checkpoint(folder) as checkpoint:
        assert isinstance(checkpoint, SafetensorsCheckpoint)
        spec = matrix("q", rows, cols, sources=(f"{module}.weight",))
        weight = load_weights(checkpoint, [spec], policy=FormatPolicy.parse(formats))["q"]
    assert isinstance(weight, PackedWeight)
    return weight


def check(folder: Path, q: slow.Quantized | slow.Floats8, format_name: str) -> None:
    weight = load(folder, len(q.codes), len(q.codes[0]))
    assert weight.format_name == format_name
    assert torch.equal(weight.unpack(), q.floats())
