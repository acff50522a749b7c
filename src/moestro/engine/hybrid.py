"""Which experts an accelerator holds while the CPU computes the others: from options to banks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from moestro.core.errors import InvalidRequest, OutOfBudget
from moestro.core.units import format_bytes
from moestro.devices.base import Accelerator, Device
from moestro.engine.config import EngineConfig
from moestro.engine.shape import is_routed
from moestro.formats.base import PackedWeight
from moestro.memory.expert_bank import ExpertBank
from moestro.memory.hybrid_bank import Crossing, place_experts
from moestro.memory.loader import Weights
from moestro.memory.pins import Pin, Tier
from moestro.memory.placement import ExpertLayer, Placement, Room, place
from moestro.memory.plan import Plan
from moestro.memory.weights import WeightSpec
from moestro.models.spec import ModelDescription


def require_accelerator(config: EngineConfig, device: Device) -> None:
    """Raise InvalidRequest for options that the device has no use for."""
    if isinstance(device, Accelerator):
        return
    for name, value in (
        ("accelerator_memory", config.accelerator_memory),
        ("placement", config.placement),
        ("expert_pins", config.expert_pins),
    ):
        if value:
            raise InvalidRequest(
                f"{name} is for a device with memory of its own, which {device.name} is not; "
                "choose another device, or leave it out"
            )


def require_all_in_memory(plan: Plan, device: Device) -> None:
    """Raise OutOfBudget for a plan that reads experts from disk, on a device that cannot."""
    if isinstance(device, Accelerator) and plan.streams:
        raise OutOfBudget(
            f"{format_bytes(plan.disk)} of experts do not fit into memory; {device.name} does not "
            "read experts from disk, the device cpu does"
        )


def divide(
    device: Accelerator,
    description: ModelDescription,
    weights: Weights,
    config: EngineConfig,
    *,
    kv: int,
    buffers: int,
) -> Placement:
    """Put experts into the accelerator's memory, as many as its budget leaves room for beside dense
    weights, ``kv`` bytes of keys and values and ``buffers`` bytes of activations; the others stay
    in RAM. All that is counted for as long as the placement is kept.

    Raises OutOfBudget if the rest does not fit, InvalidRequest for pins that select no expert.
    """
    memory = device.memory
    memory.set_budget(config.accelerator_bytes())
    specs = [spec for spec in description.weights if is_routed(spec)]
    keys = {spec.key: spec.layer for spec in specs}
    needs = {
        "dense weights": sum(_nbytes(w) for key, w in weights.items() if key not in keys),
        "KV cache": kv,
        "activations": buffers,
    }
    room: dict[Tier, Room] = {"accelerator": Room(), "ram": Room()}
    if memory.budget is not None:
        taken = sum(memory.held.values()) + sum(needs.values())
        taken += _crossing_nbytes(description, specs, config.max_batch_tokens)
        room["accelerator"] = Room(nbytes=max(0, memory.budget - taken))
    placement = place(
        [_expert_layer(weights, spec) for spec in specs],
        room,
        policy=config.placement or "uniform",
        pins=[Pin.parse(text) for text in config.expert_pins],
    )
    for what, nbytes in needs.items():
        memory.reserve(what, nbytes, placement)
    near = {layer: placement.experts(layer, "accelerator") for layer in keys.values()}
    place_experts(weights, near, keys, device)
    return placement


def _crossing_nbytes(
    description: ModelDescription, specs: Sequence[WeightSpec], tokens: int
) -> int:
    """Results that wait for those of the CPU: of as many experts as a token chooses, and of those
    that every token passes.
    """
    if not specs:
        return 0
    chosen = getattr(description.config, "top_k", specs[0].shape[0])
    shared = any(s.role == "shared" for s in description.weights)
    return Crossing.nbytes(tokens, chosen + shared, description.spec.hidden_size)


def _expert_layer(weights: Weights, spec: WeightSpec) -> ExpertLayer:
    bank = cast(ExpertBank, weights[spec.key])
    return ExpertLayer(layer=spec.layer, num_experts=spec.shape[0], nbytes=bank.layout.nbytes)


def _nbytes(weight: PackedWeight | Tensor | ExpertBank) -> int:
    if isinstance(weight, Tensor):
        return weight.numel() * weight.element_size()
    return weight.nbytes
