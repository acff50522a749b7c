"""The plan as a function: never over budget, pins honoured, never slower with more of anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.core.errors import InvalidRequest, OutOfBudget
from moestro.machine.rates import AcceleratorRates, CpuRates, MachineRates, Rate
from moestro.memory.forecast import READING_SPEED, make_forecast
from moestro.memory.model_shape import Cache, Experts, Group, ModelShape, Product
from moestro.memory.pins import Pin
from moestro.memory.plan import Budgets, Demand, Plan, make_plan

MIB = 2**20
GB = 10**9


def product(nbytes: int, *, is_float: bool = False) -> Product:
    return Product(
        format_name="any", nbytes=nbytes, operations=4 * max(1, nbytes), is_float=is_float
    )


def model(
    *, layers: int = 4, experts: int = 8, top_k: int = 2, blob: int = MIB, dense: int = 2 * MIB
) -> ModelShape:
    groups = [Group(key="embed_tokens", layer=-1, nbytes=3 * MIB, products=())]
    for n in range(layers):
        groups += [
            Group(key=f"layers.{n}.attention", layer=n, nbytes=dense, products=(product(dense),)),
            Group(key=f"layers.{n}.router", layer=n, nbytes=4096, products=(product(4096),)),
        ]
    head = Group(
        key="lm_head", layer=-1, nbytes=MIB, products=(product(MIB, is_float=True),), per_logit=True
    )
    return ModelShape(
        name="test",
        hidden_size=256,
        vocab_size=1000,
        context_length=4096,
        groups=(*groups, head),
        experts=tuple(
            Experts(
                layer=n, num_experts=experts, top_k=top_k, nbytes=blob, products=(product(blob),)
            )
            for n in range(layers)
        ),
        caches=tuple(Cache(layer=n, nbytes=256, operations=1024) for n in range(layers)),
        scratch_per_token=8192,
        packed=True,
    )


def machine(
    *, read: float = 40 * GB, disk: float | None = GB, accelerator: bool = False
) -> MachineRates:
    return MachineRates(
        name="test",
        memory=64 * MIB,
        cpu=CpuRates(threads=4, read=Rate.exactly(read), dot=1e12, pairs=5e11),
        disk=disk,
        accelerator=AcceleratorRates(
            name="card", memory=64 * MIB, read=500e9, compute=5e13, to_device=2e10, to_host=2e10
        )
        if accelerator
        else None,
    )


DEMAND = Demand(context=1024, default_context=1024, max_batch_tokens=64)

models = st.builds(
    model,
    layers=st.integers(1, 5),
    experts=st.integers(2, 12),
    top_k=st.integers(1, 2),
    blob=st.integers(1, 400).map(lambda n: n * 4096),
    dense=st.integers(1, 4 * MIB),
)
rams = st.integers(0, 200 * MIB)
cards = st.none() | st.integers(0, 100 * MIB)
profiles = st.none() | st.lists(st.floats(0, 1e6), min_size=12, max_size=12)


def counts_of(shape: ModelShape, numbers: list[float] | None) -> dict[int, list[float]] | None:
    if numbers is None:
        return None
    return {e.layer: numbers[: e.num_experts] for e in shape.experts}


def consistent(plan: Plan) -> None:
    """Every byte is in one tier."""
    shape = plan.shape
    assert sum(t.weights for t in plan.tiers.values()) == shape.dense_nbytes
    assert plan.placement is not None
    in_tiers = sum(plan.placement.nbytes(t) for t in ("ram", "accelerator", "disk"))
    assert in_tiers == shape.experts_nbytes
    assert sum(t.kv for t in plan.tiers.values()) == plan.pages * plan.page_nbytes


@settings(max_examples=25, deadline=None)
@given(models, rams, cards, st.booleans(), profiles)
def test_what_fits_is_within_every_budget(shape, ram, card, disk, numbers) -> None:
    budgets = Budgets(ram=ram, accelerator=card, disk=disk)
    counts = counts_of(shape, numbers)
    plan = make_plan(shape, DEMAND, budgets, counts=counts)
    consistent(plan)
    assert plan.fits == all(t.total <= t.budget for t in plan.tiers.values())
    assert plan.tiers["ram"].budget == ram
    for layer, slots in plan.slots.items():
        experts = next(e for e in shape.experts if e.layer == layer)
        assert min(experts.top_k, experts.num_experts) <= slots <= experts.num_experts
    assert make_plan(shape, DEMAND, budgets, counts=counts) == plan


@settings(max_examples=25, deadline=None)
@given(
    models,
    rams,
    cards,
    profiles,
    st.sampled_from(["ram", "card", "read", "dot", "pairs", "disk", "bus", "card_read"]),
    st.integers(1, 50),
)
def test_more_of_anything_is_never_slower(shape, ram, card, numbers, what, amount) -> None:
    budgets = Budgets(ram=ram, accelerator=card, disk=True)
    before = machine(accelerator=card is not None)
    after, more = before, budgets
    if what == "ram":
        more = replace(budgets, ram=ram + amount * MIB)
    elif card is not None and what == "card":
        more = replace(budgets, accelerator=card + amount * MIB)
    elif what in ("read", "dot", "pairs"):
        value = Rate.exactly((40 + amount) * GB) if what == "read" else (1 + amount) * 1e12
        after = replace(before, cpu=replace(before.cpu, **{what: value}))
    elif what == "disk":
        after = replace(before, disk=GB * (1 + amount / 10))
    elif before.accelerator is not None:
        faster = {"to_host": 4e10} if what == "bus" else {"read": 900e9}
        after = replace(before, accelerator=replace(before.accelerator, **faster))
    counts = counts_of(shape, numbers)
    now = make_forecast(shape, before, DEMAND, budgets, counts=counts)
    then = make_forecast(shape, after, DEMAND, more, counts=counts)
    assert then.plan.fits >= now.plan.fits
    if now.plan.fits:
        tolerance = 1 - 1e-9  # sums in another order
        for speed in ("decode", "prefill"):
            slow, fast = getattr(now, speed), getattr(then, speed)
            assert fast.tokens_per_second >= slow.tokens_per_second * tolerance
    assert all(gain.decode >= -1e-9 * now.decode.tokens_per_second for gain in now.gains)


@settings(max_examples=15, deadline=None)
@given(models, st.integers(20, 200), st.data())
def test_pins_are_honoured_and_the_rest_is_planned_around_them(shape, ram, data) -> None:
    tier = data.draw(st.sampled_from(["ram", "disk", "accelerator"]))
    last = data.draw(st.integers(0, len(shape.experts) - 1))
    pin = Pin.parse(f"layers.0-{last}.experts.0={tier}")
    budgets = Budgets(ram=ram * MIB, accelerator=30 * MIB, disk=True)
    plan = make_plan(shape, DEMAND, budgets, pins=[pin])
    consistent(plan)
    assert plan.placement is not None
    assert all(plan.placement.tiers[n][0] == tier for n in range(last + 1))
    if plan.fits and shape.weights_nbytes < 10 * MIB:
        assert set(plan.groups.values()) >= {"ram"}


def test_pinned_groups_stay_where_they_are_asked_to_be() -> None:
    budgets = Budgets(ram=200 * MIB, accelerator=50 * MIB)
    pins = [Pin.parse("layers.0-1.attention=ram"), Pin.parse("lm_head=accelerator")]
    plan = make_plan(model(), DEMAND, budgets, pins=pins)
    assert plan.groups["layers.0.attention"] == plan.groups["layers.1.attention"] == "ram"
    assert plan.groups["layers.2.attention"] == plan.groups["lm_head"] == "accelerator"
    assert plan.tiers["accelerator"].experts > 0  # pins do not turn the rest off
    assert plan.tiers["accelerator"].kv == plan.pages * 32 * 2 * 256


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers.9.experts=ram", "selects nothing"),
        ("layers.0.experts=accelerator", "has only"),
        ("layers.0=disk", "only experts can be"),
    ],
)
def test_pins_that_cannot_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make_plan(model(), DEMAND, Budgets(ram=200 * MIB, disk=True), pins=[Pin.parse(text)])


def test_pins_beyond_a_tier_are_refused() -> None:
    with pytest.raises(OutOfBudget, match="pin fewer"):
        make_plan(
            model(),
            DEMAND,
            Budgets(ram=30 * MIB, disk=True),
            pins=[Pin.parse("layers.*.experts=ram")],
        )


def test_without_a_disk_all_experts_have_to_be_in_memory() -> None:
    plan = make_plan(model(), DEMAND, Budgets(ram=30 * MIB))
    assert not plan.fits and not plan.streams and plan.ram.missing > 0
    streamed = make_plan(model(), DEMAND, Budgets(ram=35 * MIB, disk=True, read_ahead=2))
    assert streamed.fits and streamed.streams and streamed.ram.staging > 0


def test_a_context_that_was_not_asked_for_shrinks_only_where_that_makes_it_fit() -> None:
    demand = Demand(default_context=4096, max_batch_tokens=64)
    whole = make_plan(model(), demand, Budgets(ram=100 * MIB))
    assert whole.fits and whole.context == 4096
    short = make_plan(model(), demand, Budgets(ram=whole.ram.total - MIB))
    assert short.fits and 512 <= short.context < 4096
    assert short.ram.total > short.ram.budget - 32 * 4 * 256  # not a page smaller than needed


def test_the_time_of_a_step_is_what_its_bytes_take() -> None:
    """Independent arithmetic: on a machine with endless compute, decode reads its bytes at nine
    tenths of the bandwidth, beside fixed costs; experts on disk at the drive's rate.
    """
    shape = model(layers=2, experts=8, top_k=2)
    cpu = CpuRates(threads=1, read=Rate.exactly(GB), dot=1e30, pairs=1e30)
    still = MachineRates(name="test", memory=0, cpu=cpu, disk=0.1 * GB)
    demand = replace(DEMAND, context=2)
    here = make_forecast(shape, still, demand, Budgets(ram=200 * MIB, disk=True))
    nbytes = 2 * (2 * MIB + 4096 + 2 * MIB + 2 * 256) + MIB
    shares = here.decode.shares
    seconds = 1 / here.decode.tokens_per_second
    assert shares["RAM bandwidth"] * seconds == pytest.approx(nbytes / 0.9 / GB)
    assert here.decode.limit == "RAM bandwidth"
    half = replace(still, disk=0.1 * GB)
    pins = [Pin.parse("layers.*.experts.4=disk"), Pin.parse("layers.*.experts.5=disk")]
    away = make_forecast(shape, half, demand, Budgets(ram=200 * MIB, disk=True), pins=pins)
    missed = 2 * 2 * (2 / 8) * MIB  # layers, experts on disk, chance of each
    slower = 1 / away.decode.tokens_per_second - seconds
    ram_time = 2 * 2 * MIB / 0.9 / GB  # of all chosen experts, while misses are read
    assert slower == pytest.approx(max(0.0, missed / 0.1 / GB - ram_time), rel=1e-6)


def test_a_profile_lowers_the_rate_of_misses() -> None:
    shape, budgets = model(), Budgets(ram=40 * MIB, disk=True)
    skewed = {n: [100.0, 80.0, 60.0, 1.0, 1.0, 1.0, 1.0, 1.0] for n in range(4)}
    uniform = make_forecast(shape, machine(), DEMAND, budgets)
    known = make_forecast(shape, machine(), DEMAND, budgets, counts=skewed)
    assert known.counts_known and not uniform.counts_known
    assert known.decode.tokens_per_second > 1.3 * uniform.decode.tokens_per_second


def test_the_verdict_states_its_threshold_and_what_this_version_cannot_do() -> None:
    shape, rates = model(), machine(accelerator=True)
    budgets = Budgets(ram=200 * MIB, accelerator=100 * MIB, disk=True)
    missing = {"accelerator": "no card yet", "disk": "no disk yet"}
    found = make_forecast(shape, rates, DEMAND, budgets, missing=missing)
    assert found.verdict == "runs well" and not found.runnable
    assert found.not_yet == ("no card yet",)
    assert "Not with this version: no card yet" in found.sentence
    here = make_forecast(shape, machine(), DEMAND, Budgets(ram=200 * MIB), missing=missing)
    assert here.runnable and f"{READING_SPEED:g}" in here.sentence
    slow = make_forecast(shape, machine(read=10**7), DEMAND, Budgets(ram=200 * MIB))
    assert slow.verdict == "runs" and "would run well" in slow.sentence
    small = make_forecast(shape, machine(), DEMAND, Budgets(ram=10 * MIB, disk=True))
    assert small.verdict == "does not fit" and not small.runnable and not small.gains
    assert "missing" in small.sentence


def test_an_accelerator_slower_than_the_cpu_is_left_alone() -> None:
    rates = machine(accelerator=True)
    assert rates.accelerator is not None
    slow = replace(rates, accelerator=replace(rates.accelerator, read=1e9))
    budgets = Budgets(ram=200 * MIB, accelerator=100 * MIB)
    assert "accelerator" not in make_forecast(model(), slow, DEMAND, budgets).plan.tiers
    assert "accelerator" in make_forecast(model(), rates, DEMAND, budgets).plan.tiers
