"""What pins select of a model: routed experts, and groups of weights that every token passes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from moestro.core.errors import InvalidRequest
from moestro.memory.model_shape import ModelShape
from moestro.memory.pins import Pin, Tier
from moestro.memory.placement import expert_key


def selects_expert(pin: Pin, shape: ModelShape) -> bool:
    """Whether a pin selects any routed expert."""
    return any(
        pin.selects(expert_key(layer.layer, e))
        for layer in shape.experts
        for e in range(layer.num_experts)
    )


def pinned_groups(shape: ModelShape, pins: Sequence[Pin]) -> dict[str, Tier]:
    """Tier of each pinned group; the last pin that selects it wins."""
    found: dict[str, Tier] = {}
    for group in shape.groups:
        for pin in pins:
            if pin.selects(group.key):
                found[group.key] = pin.tier
    return found


def check_pins(
    shape: ModelShape,
    there: Collection[Tier],
    pins: Sequence[Pin],
    expert_pins: Sequence[Pin],
    group_pins: Mapping[str, Tier],
) -> None:
    """Raise InvalidRequest for pins that select nothing, name a tier that is not there, or ask for
    weights on disk that every token needs.
    """
    for pin in pins:
        if pin.tier not in there:
            raise InvalidRequest(
                f"the pin {pin} asks for {pin.tier}, but this plan has only: "
                f"{', '.join(sorted(there))}"
            )
        selected = [key for key in group_pins if pin.selects(key)]
        if pin not in expert_pins and not selected:
            raise InvalidRequest(
                f"the pin {pin} selects nothing; there are for example "
                f"{', '.join([g.key for g in shape.groups[:3]] + ['layers.N.experts.M'])}"
            )
        if pin.tier == "disk" and selected:
            raise InvalidRequest(
                f"the pin {pin} asks for disk, where only experts can be, but it selects "
                f"{selected[0]} too; write for example layers.0-9.experts=disk"
            )
