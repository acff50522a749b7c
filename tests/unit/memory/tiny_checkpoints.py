"""Checkpoints for these tests: tensors in memory, and a tiny mixture of experts on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from moestro.checkpoints.base import TensorInfo
from moestro.core.errors import CheckpointError
from moestro.memory.weights import ExpertSources, WeightSpec

HIDDEN, INTERMEDIATE, EXPERTS, VOCAB = 64, 32, 3, 40
TYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class MemoryCheckpoint:
    """A Checkpoint over tensors in memory; raw quantized bytes come as (type, shape, uint8)."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor | tuple[str, tuple[int, ...], Tensor]],
        container: str = "safetensors",
    ) -> None:
        self.container = container
        self.path = Path("memory")
        self.config: Mapping[str, Any] = {"model_type": "tiny"}
        self.architecture = "tiny"
        self.reads: list[str] = []
        self._raw: dict[str, Tensor] = {}
        self._infos: dict[str, TensorInfo] = {}
        for name, value in tensors.items():
            if isinstance(value, tuple):
                dtype, shape, raw = value
            else:
                dtype, shape = TYPE_NAMES[value.dtype], tuple(value.shape)
                raw = value.contiguous().view(-1).view(torch.uint8)
            self._raw[name] = raw
            self._infos[name] = TensorInfo(
                name=name, shape=shape, dtype=dtype, file=self.path, offset=0, nbytes=raw.numel()
            )

    def names(self) -> list[str]:
        return list(self._infos)

    def info(self, name: str) -> TensorInfo:
        if name not in self._infos:
            raise CheckpointError(f"no {name}")
        return self._infos[name]

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        self.reads.append(name)
        raw = self._raw[name]
        if rows is None:
            return raw.clone()
        size = raw.numel() // self._infos[name].shape[0]
        return raw[rows[0] * size : rows[1] * size].clone()

    def read_range(self, name: str, start: int, nbytes: int) -> Tensor:
        self.reads.append(name)
        return self._raw[name][start : start + nbytes].clone()

    def read_once(self) -> None:
        pass

    def close(self) -> None:
        pass


def vector(key: str = "norm", n: int = HIDDEN, **more: Any) -> WeightSpec:
    return WeightSpec(key=key, kind="vector", role="norm", shape=(n,), sources=(key,), **more)


def matrix(
    key: str = "q", n: int = 48, k: int = HIDDEN, role: str = "attention", **more: Any
) -> WeightSpec:
    more.setdefault("sources", (key,))
    return WeightSpec(key=key, kind="matrix", role=role, shape=(n, k), **more)  # type: ignore[arg-type]


def experts(
    layer: int = 0, count: int = EXPERTS, activation: str = "silu", **sources: Any
) -> WeightSpec:
    prefix = f"layers.{layer}.experts"
    if not sources:
        sources = {
            name: (f"{prefix}.{{e}}.{name}", f"{prefix}.{name}_stack")
            for name in ("gate", "up", "down")
        }
    return WeightSpec(
        key=prefix,
        kind="experts",
        role="experts",
        shape=(count, INTERMEDIATE, HIDDEN),
        expert_sources=ExpertSources(**sources),
        layer=layer,
        activation=activation,
    )


def expert_tensors(layer: int = 0, count: int = EXPERTS, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed + layer)
    out = {}
    for e in range(count):
        for name, shape in (
            ("gate", (INTERMEDIATE, HIDDEN)),
            ("up", (INTERMEDIATE, HIDDEN)),
            ("down", (HIDDEN, INTERMEDIATE)),
        ):
            values = torch.randn(shape, generator=generator) * 0.05
            out[f"layers.{layer}.experts.{e}.{name}"] = values.to(torch.bfloat16)
    return out


def tiny_model(layers: int = 2) -> tuple[dict[str, Tensor], list[WeightSpec]]:
    """Tensors and specs of a whole little model (embedding, two layers, norm, no lm_head)."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.05).to(torch.bfloat16)

    tensors = {"embed": random(VOCAB, HIDDEN), "norm": random(HIDDEN)}
    specs = [matrix("embed", VOCAB, role="embedding"), vector("norm")]
    for layer in range(layers):
        tensors[f"layers.{layer}.q"] = random(48, HIDDEN)
        tensors[f"layers.{layer}.router"] = random(EXPERTS, HIDDEN)
        tensors |= expert_tensors(layer)
        specs.append(matrix(f"layers.{layer}.q", layer=layer))
        specs.append(matrix(f"layers.{layer}.router", EXPERTS, role="router", layer=layer))
        specs.append(experts(layer))
    specs.append(matrix("lm_head", VOCAB, role="lm_head", optional=True))
    return tensors, specs


def save_model(directory: Path, tensors: Mapping[str, Tensor]) -> Path:
    """A Hugging Face style directory."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), directory / "model.safetensors")
    config = {
        "model_type": "tiny",
        "num_experts": EXPERTS,
        "rope_theta": 1e6,
        "limit": float("inf"),
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text('{"model": "tokens"}')
    (directory / "notes.txt").write_text("not part of the model")
    return directory
