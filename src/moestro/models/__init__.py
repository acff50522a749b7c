"""Finds model families: each is a file here, named by its Hugging Face model_type.

``describe`` reads a checkpoint's configuration into a ModelDescription, ``build`` wires loaded
weights into a Model. A family is added by its file alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, cast

import torch
from torch import Tensor

from moestro.checkpoints.base import Checkpoint
from moestro.core.errors import CheckpointError, InvalidRequest, UnsupportedArchitecture
from moestro.devices.base import Device
from moestro.memory.weights import WeightSpec
from moestro.models.spec import Family, Model, ModelDescription, ModelSpec, Weights

__all__ = ["Model", "ModelDescription", "ModelSpec", "build", "describe", "families", "family"]

_NOT_FAMILIES = {"spec", "upcycle"}


@cache
def families() -> dict[str, Family]:
    """All families by model_type."""
    files = (m.name for m in iter_modules(__path__) if not m.ispkg and m.name not in _NOT_FAMILIES)
    return {name: cast(Family, import_module(f"{__name__}.{name}")) for name in files}


def family(model_type: str) -> Family:
    """The family of that model_type. Raises UnsupportedArchitecture listing the known ones."""
    if model_type not in families():
        raise UnsupportedArchitecture(
            f"model family {model_type!r} is not implemented; these are: {', '.join(families())}"
        )
    return families()[model_type]


def describe(checkpoint: Checkpoint) -> ModelDescription:
    """What model a checkpoint holds, from its configuration alone.

    Raises UnsupportedArchitecture for a family or an option that is not implemented, and
    CheckpointError for a configuration with missing or impossible values.
    """
    # A packed directory keeps the configuration of the checkpoint it was made from.
    container: Any = getattr(checkpoint, "config_container", checkpoint.container)
    raw = checkpoint.config
    if container == "gguf":
        chosen = _gguf_family(raw)
        config = chosen.Config.from_gguf(raw)
    elif container == "safetensors":
        chosen = family(raw.get("model_type") or checkpoint.architecture)
        config = chosen.Config.from_hf(raw)
    else:
        raise CheckpointError(
            f"{checkpoint.path} does not say whether its configuration is that of a safetensors "
            f"or a GGUF checkpoint (found {container!r}); convert the model again"
        )
    return ModelDescription(
        config=config, spec=config.spec(), weights=chosen.weights(config, container)
    )


def build(
    description: ModelDescription,
    weights: Weights,
    device: Device,
    *,
    max_positions: int | None = None,
) -> Model:
    """The described model over its loaded weights.

    max_positions: cap on the context, which sizes the rope tables; the model's own context length
    by default. Raises CheckpointError naming weights that are missing or of the wrong shape.
    """
    _check(description.weights, weights)
    context = description.spec.context_length
    if max_positions is not None and not 1 <= max_positions <= context:
        raise InvalidRequest(
            f"a context of {max_positions} tokens was asked for; this model takes 1 to {context}"
        )
    chosen = family(description.spec.model_type)
    return chosen.build(description.config, weights, device, max_positions=max_positions or context)


def _gguf_family(metadata: Mapping[str, Any]) -> Family:
    for candidate in families().values():
        if candidate.claims_gguf(metadata):
            return candidate
    raise UnsupportedArchitecture(
        f"GGUF architecture {metadata.get('general.architecture')!r} is not implemented; "
        f"model families that are: {', '.join(families())}"
    )


def _check(specs: list[WeightSpec], weights: Weights) -> None:
    missing = [s.key for s in specs if not s.optional and s.key not in weights]
    if missing:
        raise CheckpointError(
            f"{len(missing)} weights of the model were not loaded, first: {', '.join(missing[:3])}"
        )
    for problem in _shape_problems(specs, weights):
        raise CheckpointError(problem)


def _shape_problems(specs: list[WeightSpec], weights: Weights) -> Iterator[str]:
    for spec in specs:
        weight: Any = weights.get(spec.key)
        if weight is None:
            continue
        if spec.kind == "vector":
            ok = isinstance(weight, Tensor) and weight.dtype == torch.float32
            found = tuple(weight.shape) if ok else None
        elif spec.kind == "matrix":
            found = getattr(weight, "rows", None), getattr(weight, "cols", None)
        else:
            gate = weight.projections[0]
            found = (len(weight.pointers), gate.rows, gate.cols)
        if found != spec.shape:
            yield f"weight {spec.key} was loaded as {found}, the model needs {spec.shape}"
