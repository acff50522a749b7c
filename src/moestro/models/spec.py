"""What the floors above know of a model: its facts, its description, and the model itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from moestro.devices.base import Device
from moestro.memory.weights import WeightSpec
from moestro.nn.buffers import Buffers
from moestro.nn.kv_cache import CacheShape
from moestro.nn.mlp import Experts
from moestro.ops.contracts import Batch, LayerCache, Packed

#: where a configuration came from: config.json, or the key/values of a GGUF file
Container = Literal["safetensors", "gguf"]

#: loaded weights by key: matrices, float32 vectors, expert banks
Weights = Mapping[str, Packed | Tensor | Experts]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Facts the engine schedules by.

    caches: what each layer caches. context_length: positions the model was made for.
    eos_token_ids: as far as the configuration tells; a tokenizer may know more.
    """

    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    caches: tuple[CacheShape, ...]
    context_length: int
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A checkpoint's model before any weight is read.

    config: the family's own Config. weights: what it consists of, in execution order.
    """

    config: Any
    spec: ModelSpec
    weights: list[WeightSpec] = field(repr=False)


class Model(Protocol):
    """A model ready to run on one device."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def device(self) -> Device: ...

    def allocate_cache(self, *, pages: int, page_size: int, dtype: torch.dtype) -> list[LayerCache]:
        """Zeroed caches, one per layer; page_size is a multiple of 16."""
        ...

    def allocate_buffers(self, *, tokens: int, logits: int) -> Buffers:
        """Every activation buffer for up to ``tokens`` tokens and ``logits`` logit rows a step."""
        ...

    def forward(self, batch: Batch, cache: Sequence[LayerCache], buffers: Buffers) -> None:
        """One ragged step; issues ops only, so it can run inside ``device.ops.record()``."""
        ...


class FamilyConfig(Protocol):
    """A family's frozen configuration; its dataclass fields are all the model depends on."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> FamilyConfig:
        """From config.json. Raises CheckpointError for missing or impossible values and
        UnsupportedArchitecture naming an option that is not implemented.
        """
        ...

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> FamilyConfig:
        """From GGUF key/values; raises as ``from_hf``."""
        ...

    def spec(self) -> ModelSpec: ...


class Family(Protocol):
    """What every family's file in this folder offers, under these names."""

    Config: type[FamilyConfig]

    def claims_gguf(self, metadata: Mapping[str, Any]) -> bool:
        """Whether a GGUF file with these key/values is of this family."""
        ...

    def weights(self, config: Any, container: Container) -> list[WeightSpec]:
        """Every weight with its tensor names in both containers, in execution order."""
        ...

    def build(self, config: Any, weights: Weights, device: Device, *, max_positions: int) -> Model:
        """The model over loaded weights, for positions 0..max_positions - 1."""
        ...

    def tiny(self) -> dict[str, Any]:
        """config.json of a model small enough to test with random weights."""
        ...
