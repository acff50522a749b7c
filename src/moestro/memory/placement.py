"""Where every expert of every layer lives: static placements, from shapes and numbers alone.

A placement is made by filling the tiers from the fastest on, each in the order of preference that a
policy gives, until its room ends; the slowest takes the rest. A policy is that order and nothing
else, so all of them keep the budget and the pins alike, and more room only ever adds experts.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moestro.core.errors import InvalidRequest, OutOfBudget
from moestro.core.units import format_bytes
from moestro.memory.pins import TIERS, Pin, Tier

#: selections of each expert by layer, in any unit: only their shares count
Counts = Mapping[int, Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class ExpertLayer:
    """The experts of one layer. nbytes: of each one's blob."""

    layer: int
    num_experts: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a tier offers to experts. nbytes: of all layers together; slots: experts of each layer.
    None: as many as come.
    """

    nbytes: int | None = None
    slots: int | None = None


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The tier of every expert: ``tiers[layer][expert]``, for each of ``layers``."""

    layers: tuple[ExpertLayer, ...]
    tiers: Mapping[int, tuple[Tier, ...]]

    def experts(self, layer: int, tier: Tier) -> tuple[int, ...]:
        """Ids of a layer's experts in a tier, ascending."""
        return tuple(e for e, found in enumerate(self.tiers[layer]) if found == tier)

    def counts(self, tier: Tier) -> dict[int, int]:
        """Number of experts in a tier by layer."""
        return {layer: found.count(tier) for layer, found in self.tiers.items()}

    def nbytes(self, tier: Tier) -> int:
        """Bytes of all experts in a tier."""
        counts = self.counts(tier)
        return sum(counts[layer.layer] * layer.nbytes for layer in self.layers)

    def shares(self, tier: Tier, counts: Counts | None = None) -> dict[int, float]:
        """Part of each layer's selections that a tier serves, 0 to 1: by ``counts``, or with every
        expert chosen equally often where there are none for a layer.
        """
        shares = expert_shares(self.layers, counts)
        return {
            layer: math.fsum(shares[layer][e] for e in self.experts(layer, tier))
            for layer in self.tiers
        }


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """An expert that is not placed yet. rank: experts of its layer that the tier takes before it if
    it takes them by ascending id; share: of its layer's selections.
    """

    layer: ExpertLayer
    expert: int
    rank: int
    share: float
    seed: int


def _uniform(c: _Candidate) -> tuple[float, ...]:
    return c.rank, c.layer.layer


def _front(c: _Candidate) -> tuple[float, ...]:
    return c.layer.layer, c.expert


def _frequency(c: _Candidate) -> tuple[float, ...]:
    # Rounded, so that equals are not told apart by the last bit of a division.
    return -round(c.share * 2.0**40) / max(c.layer.nbytes, 1), c.rank, c.layer.layer


def _random(c: _Candidate) -> tuple[float, ...]:
    # A number of the expert alone: which others there are does not change the order.
    text = f"{c.seed} {c.layer.layer} {c.expert}"
    digest = hashlib.blake2b(text.encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little"), c.layer.layer, c.expert


#: name -> sort key of experts, those that a tier takes first come first:
#: ``uniform``: as many of every layer; ``front``: whole layers from the first on; ``frequency``: by
#: selections per byte (needs counts); ``random``: any, the same ones for the same seed
POLICIES: Mapping[str, Callable[[_Candidate], tuple[float, ...]]] = {
    "uniform": _uniform,
    "front": _front,
    "frequency": _frequency,
    "random": _random,
}


def place(
    layers: Sequence[ExpertLayer],
    room: Mapping[Tier, Room],
    *,
    policy: str = "uniform",
    pins: Sequence[Pin] = (),
    counts: Counts | None = None,
    seed: int = 0,
) -> Placement:
    """Give every expert one of the tiers in ``room``.

    pins go first, of several that select an expert the last; then each tier but the slowest takes
    experts in the policy's order while they fit; the slowest takes the rest. counts: for
    ``frequency`` (layers without are taken as uniform). seed: for ``random``.

    Deterministic. Raises InvalidRequest for an unknown policy, pins that select no expert or name a
    tier that is not there, and counts that are none; OutOfBudget when pins ask for more than a tier
    has, or the slowest has no room for the rest.
    """
    if policy not in POLICIES:
        raise InvalidRequest(
            f"unknown placement policy {policy!r}; known: {', '.join(sorted(POLICIES))}"
        )
    if policy == "frequency" and counts is None:
        raise InvalidRequest(
            "the placement policy 'frequency' needs measured selections, and there is no profile "
            "of this model; choose another policy, or run the model first"
        )
    order = [tier for tier in TIERS if tier in room]
    if not order or len({layer.layer for layer in layers}) < len(layers):
        raise ValueError("a placement needs a tier, and each layer once")
    shares = expert_shares(layers, counts)
    filling = _Filling(layers, room)
    _place_pinned(filling, pins, order)
    for tier in order[:-1]:
        candidates = filling.candidates(tier, shares, seed)
        filling.fill(tier, sorted(candidates, key=POLICIES[policy]))
    _place_rest(filling, order[-1])
    return Placement(
        layers=tuple(layers),
        tiers={
            layer.layer: tuple(filling.tiers[layer.layer, e] for e in range(layer.num_experts))
            for layer in layers
        },
    )


def expert_shares(
    layers: Iterable[ExpertLayer], counts: Counts | None
) -> dict[int, tuple[float, ...]]:
    """Each expert's part of its layer's selections; all equal where nothing was counted.

    Raises InvalidRequest for counts of another number of experts, negative or not finite.
    """
    shares = {}
    for layer in layers:
        found = (counts or {}).get(layer.layer, ())
        total = math.fsum(found)
        if len(found) not in (0, layer.num_experts) or not all(0 <= n < math.inf for n in found):
            raise InvalidRequest(
                f"selection counts of layer {layer.layer} should be {layer.num_experts} numbers "
                "that are not negative; they are of another model"
            )
        if total > 0:
            shares[layer.layer] = tuple(n / total for n in found)
        else:
            shares[layer.layer] = (1 / layer.num_experts,) * layer.num_experts
    return shares


@dataclass
class _Filling:
    """The state of ``place``: who is where, and what that takes of each tier."""

    layers: Sequence[ExpertLayer]
    room: Mapping[Tier, Room]
    tiers: dict[tuple[int, int], Tier] = field(default_factory=dict)
    used: Counter[Tier] = field(default_factory=Counter)
    slots: Counter[tuple[Tier, int]] = field(default_factory=Counter)

    def put(self, tier: Tier, layer: ExpertLayer, expert: int) -> None:
        self.tiers[layer.layer, expert] = tier
        self.used[tier] += layer.nbytes
        self.slots[tier, layer.layer] += 1

    def free(self, layer: ExpertLayer) -> list[int]:
        return [e for e in range(layer.num_experts) if (layer.layer, e) not in self.tiers]

    def candidates(
        self, tier: Tier, shares: Mapping[int, Sequence[float]], seed: int
    ) -> list[_Candidate]:
        return [
            _Candidate(
                layer=layer,
                expert=expert,
                rank=self.slots[tier, layer.layer] + index,
                share=shares[layer.layer][expert],
                seed=seed,
            )
            for layer in self.layers
            for index, expert in enumerate(self.free(layer))
        ]

    def fill(self, tier: Tier, candidates: Iterable[_Candidate]) -> None:
        """A layer whose slots are taken is passed over; the first expert that the bytes do not
        suffice for ends it, so that with more room nothing leaves.
        """
        room = self.room[tier]
        for candidate in candidates:
            layer = candidate.layer
            if room.slots is not None and self.slots[tier, layer.layer] >= room.slots:
                continue
            if room.nbytes is not None and self.used[tier] + layer.nbytes > room.nbytes:
                break
            self.put(tier, layer, candidate.expert)

    def excess(self, tier: Tier) -> str | None:
        """What of a tier does not suffice for what was put there."""
        room = self.room[tier]
        if room.nbytes is not None and self.used[tier] > room.nbytes:
            return f"{format_bytes(self.used[tier])} of experts, it has {format_bytes(room.nbytes)}"
        for layer in self.layers:
            taken = self.slots[tier, layer.layer]
            if room.slots is not None and taken > room.slots:
                return f"{taken} experts of layer {layer.layer}, it has {room.slots} slots for each"
        return None


def _place_pinned(filling: _Filling, pins: Sequence[Pin], order: Collection[Tier]) -> None:
    for pin in pins:
        if pin.tier not in order:
            raise InvalidRequest(
                f"the pin {pin} asks for {pin.tier}, but experts can be here only in: "
                f"{', '.join(order)}"
            )
    selected: set[Pin] = set()
    for layer in filling.layers:
        for expert in range(layer.num_experts):
            matching = [pin for pin in pins if pin.selects(expert_key(layer.layer, expert))]
            selected.update(matching)
            if matching:
                filling.put(matching[-1].tier, layer, expert)
    for pin in pins:
        if pin not in selected:
            numbers = sorted(layer.layer for layer in filling.layers)
            there = f"are in layers {numbers[0]} to {numbers[-1]}" if numbers else "are not there"
            raise InvalidRequest(f"the pin {pin} selects no expert; experts {there}")
    for tier in order:
        if excess := filling.excess(tier):
            asking = ", ".join(str(pin) for pin in pins if pin.tier == tier)
            raise OutOfBudget(f"{asking}: that puts into {tier} {excess}; pin fewer")


def _place_rest(filling: _Filling, tier: Tier) -> None:
    for layer in filling.layers:
        for expert in filling.free(layer):
            filling.put(tier, layer, expert)
    if excess := filling.excess(tier):
        raise OutOfBudget(
            f"the experts do not fit: that leaves for {tier} {excess}; choose a smaller format, or "
            "convert the model so that experts may stay on disk"
        )


def expert_key(layer: int, expert: int) -> str:
    """What pins select an expert by."""
    return f"layers.{layer}.experts.{expert}"
