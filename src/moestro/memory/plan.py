"""The plan: where every part of a model goes within one budget for each tier, and what it takes.

Pure: shapes and numbers in, a Plan out; nothing is read, measured or allocated. The engine takes
its context and its pages from the same plan that ``moestro plan`` shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moestro.core.errors import InvalidRequest
from moestro.memory.model_shape import Cache, Experts, Group, ModelShape
from moestro.memory.pins import Pin, Tier
from moestro.memory.placement import Counts, Placement, Room, expert_key, expert_shares, place
from moestro.memory.plan_pins import check_pins, pinned_groups, selects_expert
from moestro.memory.speed import Placed

#: a context that was not asked for is not made smaller than this to fit; rather say what is missing
SMALLEST_CONTEXT = 512


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a run should hold.

    context: tokens a sequence may reach; None: ``default_context``, or less where memory is short.
    sequences: that get pages of keys and values at full length where memory allows; guaranteed: of
    these, how many must. max_batch_tokens: of a step. page_size: positions.
    """

    context: int | None = None
    default_context: int
    sequences: int = 1
    guaranteed: int = 1
    max_batch_tokens: int = 512
    page_size: int = 32


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bytes of each tier. accelerator: None without one. disk: whether experts may stay there.
    read_ahead: blobs that are read elsewhere than into the slots they are used from.
    """

    ram: int
    accelerator: int | None = None
    disk: bool = False
    read_ahead: int = 0


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Bytes of one tier. weights: but routed experts. staging: for reads in flight. pinned: for
    copies between an accelerator and the CPU.
    """

    budget: int
    weights: int = 0
    experts: int = 0
    kv: int = 0
    buffers: int = 0
    staging: int = 0
    pinned: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.experts + self.kv + self.buffers + self.staging + self.pinned

    @property
    def missing(self) -> int:
        """Bytes beyond the budget."""
        return max(0, self.total - self.budget)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """tiers: bytes of ``ram``, and of ``accelerator`` if there is one. pages: of keys and values,
    each ``page_size`` positions in all layers. groups: tier of each group of weights. placement: of
    routed experts. slots: of a layer whose experts are partly on disk, how many are in RAM at a
    time. disk: bytes of experts that stay on disk.
    """

    shape: ModelShape = field(repr=False)
    context: int
    pages: int
    page_size: int
    tiers: Mapping[Tier, Tally]
    groups: Mapping[str, Tier] = field(repr=False)
    placement: Placement | None = field(repr=False)
    slots: Mapping[int, int] = field(repr=False)
    disk: int = 0

    @property
    def fits(self) -> bool:
        return not any(tally.missing for tally in self.tiers.values())

    @property
    def ram(self) -> Tally:
        return self.tiers["ram"]

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page of keys and values in all layers."""
        return self.page_size * self.shape.position_nbytes

    @property
    def streams(self) -> bool:
        """Whether experts are read from disk while running."""
        return self.disk > 0

    def placed(self, counts: Counts | None = None) -> Placed:
        """Where things are, with the chance that a token chooses each expert."""
        selected: dict[int, dict[Tier, Counter[float]]] = {}
        if self.placement is not None:
            shares = expert_shares(self.placement.layers, counts)
            for experts in self.shape.experts:
                tiers: dict[Tier, Counter[float]] = {}
                for tier, share in zip(
                    self.placement.tiers[experts.layer], shares[experts.layer], strict=True
                ):
                    chance = min(1.0, experts.top_k * share)
                    tiers.setdefault(tier, Counter())[chance] += 1
                selected[experts.layer] = tiers
        return Placed(groups=self.groups, selected=selected)


def make_plan(
    shape: ModelShape,
    demand: Demand,
    budgets: Budgets,
    *,
    pins: Sequence[Pin] = (),
    counts: Counts | None = None,
    policy: str = "uniform",
) -> Plan:
    """Place everything. What every token passes goes to the accelerator first, layer by layer, and
    its keys and values with it; experts follow only when all of it is there. RAM takes the rest of
    the experts while they fit, the disk what is left. Pins come before all of that.

    Deterministic. A plan that is over a budget is returned too (``fits``), with all numbers. Raises
    InvalidRequest for a context beyond the model's own and for pins that select nothing or name a
    tier that is not there, OutOfBudget for pins that ask for more than a tier has.
    """
    if demand.context is not None and demand.context > shape.context_length:
        raise InvalidRequest(
            f"context {demand.context} is more than the {shape.context_length} tokens this model "
            "was made for; choose a smaller one"
        )
    planner = _Planner(shape, demand, budgets, tuple(pins), counts, policy)
    if demand.context is not None:
        return planner.plan(demand.context)
    context = min(shape.context_length, demand.default_context)
    plan = planner.plan(context)
    floor = min(context, SMALLEST_CONTEXT)
    if plan.fits or context == floor:
        return plan
    # Bytes grow with the context one page at a time, so the largest that fits is found by halving.
    size = demand.page_size
    low, high = -(-floor // size), -(-context // size)
    best = planner.plan(floor)
    while best.fits and high - low > 1:
        middle = (low + high) // 2
        candidate = planner.plan(min(context, middle * size))
        if candidate.fits:
            low, best = middle, candidate
        else:
            high = middle
    return best


class _Planner:
    """The steps of ``make_plan`` for one context."""

    def __init__(
        self,
        shape: ModelShape,
        demand: Demand,
        budgets: Budgets,
        pins: tuple[Pin, ...],
        counts: Counts | None,
        policy: str,
    ) -> None:
        self.shape, self.demand, self.budgets = shape, demand, budgets
        self.counts, self.policy = counts, policy
        self.expert_pins = tuple(pin for pin in pins if selects_expert(pin, shape))
        self.group_pins = pinned_groups(shape, pins)
        check_pins(shape, _tiers(budgets), pins, self.expert_pins, self.group_pins)
        self.page_nbytes = demand.page_size * shape.position_nbytes
        self.buffers = (
            demand.max_batch_tokens * shape.scratch_per_token
            + demand.sequences * (shape.vocab_size + shape.hidden_size) * 4
        )
        top_k = max((e.top_k for e in shape.experts), default=0)
        self.pinned = 2 * 4 * demand.max_batch_tokens * shape.hidden_size * (1 + top_k)
        self.staging = budgets.read_ahead * max((e.nbytes for e in shape.experts), default=0)

    def plan(self, context: int) -> Plan:
        per_sequence = -(-context // self.demand.page_size)
        pages = per_sequence * self.demand.guaranteed
        groups = self._groups(pages)
        accelerated = {key for key, tier in groups.items() if tier == "accelerator"}
        kv_on = self._kv_pages_nbytes(accelerated)
        rooms = self._rooms(groups, pages, kv_on)
        placement = self._experts(rooms)
        wanted = per_sequence * self.demand.sequences
        tiers, slots = self._tallies(groups, placement, pages, kv_on)
        pages += self._more_pages(tiers, wanted - pages, kv_on)
        tiers, slots = self._tallies(groups, placement, pages, kv_on)
        return Plan(
            shape=self.shape,
            context=context,
            pages=pages,
            page_size=self.demand.page_size,
            tiers=tiers,
            groups=groups,
            placement=placement,
            slots=slots,
            disk=0 if placement is None else placement.nbytes("disk"),
        )

    def _groups(self, pages: int) -> dict[str, Tier]:
        """The tier of each group: as pinned, then from the first layer on while they fit."""
        groups: dict[str, Tier] = {}
        left = self.budgets.accelerator
        if left is not None:
            left -= self.buffers + self._pinned_experts("accelerator")
            left -= sum(
                self._group_cost(group, pages)
                for group in self.shape.groups
                if self.group_pins.get(group.key) == "accelerator"
            )
        ended = left is None
        for group in self.shape.groups:
            tier = self.group_pins.get(group.key)
            if tier is None and not ended and left is not None and group.products:
                cost = self._group_cost(group, pages)
                ended = cost > left
                if not ended:
                    tier, left = "accelerator", left - cost
            groups[group.key] = tier or "ram"
        return groups

    def _group_cost(self, group: Group, pages: int) -> int:
        return group.nbytes + self._kv_pages_nbytes({group.key}) * pages

    def _kv_pages_nbytes(self, keys: set[str]) -> int:
        """Bytes of one page in the layers whose attention is among these groups."""
        return self.demand.page_size * sum(
            cache.nbytes for cache in self.shape.caches if attention_key(cache) in keys
        )

    def _pinned_experts(self, tier: Tier) -> int:
        return sum(
            layer.nbytes * sum(self._pin_of(layer, e) == tier for e in range(layer.num_experts))
            for layer in self.shape.experts
            if self.expert_pins
        )

    def _pin_of(self, layer: Experts, expert: int) -> Tier | None:
        key = expert_key(layer.layer, expert)
        return next((pin.tier for pin in reversed(self.expert_pins) if pin.selects(key)), None)

    def _rooms(self, groups: Mapping[str, Tier], pages: int, kv_on: int) -> dict[Tier, Room]:
        """What is left of each tier for experts."""
        used, _ = self._tallies(groups, None, pages, kv_on)
        rooms: dict[Tier, Room] = {}
        if self.budgets.accelerator is not None:
            room = max(0, self.budgets.accelerator - used["accelerator"].total)
            if any(
                groups[group.key] != "accelerator" and group.key not in self.group_pins
                for group in self.shape.groups
                if group.products
            ):
                room = min(room, self._pinned_experts("accelerator"))
            rooms["accelerator"] = Room(nbytes=room)
        if not self.budgets.disk:
            rooms["ram"] = Room()  # all the rest: too much shows in the tally
            return rooms
        room = max(0, self.budgets.ram - used["ram"].total)
        here = sum(e.total for e in self.shape.experts)
        if "accelerator" in rooms:
            here -= place(
                [e.placed for e in self.shape.experts],
                {"accelerator": rooms["accelerator"], "disk": Room()},
                policy=self._policy,
                pins=[pin for pin in self.expert_pins if pin.tier != "ram"],
                counts=self.counts,
            ).nbytes("accelerator")
        pinned = self._pinned_experts("disk")
        if here > room or pinned:
            room -= self.staging + self._working_slots()
        rooms["ram"] = Room(nbytes=max(0, room))
        rooms["disk"] = Room()
        return rooms

    @property
    def _policy(self) -> str:
        return self.policy if self.counts is not None or self.policy != "frequency" else "uniform"

    def _working_slots(self) -> int:
        """Bytes of the slots that layers need whose experts are pinned to disk."""
        return (
            sum(
                min(layer.top_k, layer.num_experts) * layer.nbytes
                for layer in self.shape.experts
                if any(self._pin_of(layer, e) == "disk" for e in range(layer.num_experts))
            )
            if any(pin.tier == "disk" for pin in self.expert_pins)
            else 0
        )

    def _experts(self, rooms: Mapping[Tier, Room]) -> Placement | None:
        if not self.shape.experts:
            return None
        return place(
            [e.placed for e in self.shape.experts],
            rooms,
            policy=self._policy,
            pins=self.expert_pins,
            counts=self.counts,
        )

    def _tallies(
        self,
        groups: Mapping[str, Tier],
        placement: Placement | None,
        pages: int,
        kv_on: int,
    ) -> tuple[dict[Tier, Tally], dict[int, int]]:
        """Bytes of each tier, and the slots of layers with experts on disk."""
        slots: dict[int, int] = {}
        experts: Counter[Tier] = Counter()
        for layer in self.shape.experts if placement is not None else ():
            found = Counter(placement.tiers[layer.layer]) if placement is not None else Counter()
            resident = found["ram"]
            if found["disk"]:
                resident = max(resident, min(layer.top_k, found["ram"] + found["disk"]))
                slots[layer.layer] = resident
            experts["ram"] += resident * layer.nbytes
            experts["accelerator"] += found["accelerator"] * layer.nbytes
        weights: Counter[Tier] = Counter()
        for group in self.shape.groups:
            weights[groups[group.key]] += group.nbytes
        accelerated = bool(weights["accelerator"] or experts["accelerator"])
        ram = Tally(
            budget=self.budgets.ram,
            weights=weights["ram"],
            experts=experts["ram"],
            kv=pages * (self.page_nbytes - kv_on),
            buffers=self.buffers,
            staging=self.staging if slots else 0,
            pinned=self.pinned if self.budgets.accelerator is not None else 0,
        )
        tiers: dict[Tier, Tally] = {"ram": ram}
        if self.budgets.accelerator is not None:
            tiers["accelerator"] = Tally(
                budget=self.budgets.accelerator,
                weights=weights["accelerator"],
                experts=experts["accelerator"],
                kv=pages * kv_on,
                buffers=self.buffers if accelerated else 0,
            )
        return tiers, slots

    def _more_pages(self, tiers: Mapping[Tier, Tally], wanted: int, kv_on: int) -> int:
        """Pages beyond the guaranteed ones that fit into what is left."""
        affordable = wanted
        for tier, per_page in (("ram", self.page_nbytes - kv_on), ("accelerator", kv_on)):
            tally = tiers.get(tier)  # type: ignore[call-overload]
            if tally is not None and per_page:
                affordable = min(affordable, (tally.budget - tally.total) // per_page)
        return max(0, affordable)


def attention_key(cache: Cache) -> str:
    """The group that a layer's keys and values lie beside."""
    return f"layers.{cache.layer}.attention"


def _tiers(budgets: Budgets) -> tuple[Tier, ...]:
    there: list[Tier] = ["ram"]
    there += ["disk"] if budgets.disk else []
    return tuple(there + (["accelerator"] if budgets.accelerator is not None else []))
