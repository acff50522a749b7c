"""Placements: never more than a tier has, pins honoured, the same every time, more room adds."""

import dataclasses
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moestro.core.errors import InvalidRequest, OutOfBudget
from moestro.memory.pins import TIERS, Pin
from moestro.memory.placement import POLICIES, ExpertLayer, Room, expert_key, place

NBYTES = 4096


def layers(count: int = 3, num_experts: int = 4, first: int = 0) -> list[ExpertLayer]:
    return [
        ExpertLayer(layer=first + n, num_experts=num_experts, nbytes=NBYTES) for n in range(count)
    ]


def on(tier: str, placement) -> dict[int, tuple[int, ...]]:
    return {layer: placement.experts(layer, tier) for layer in placement.tiers}


some_layers = st.lists(
    st.builds(
        ExpertLayer,
        layer=st.integers(0, 9),
        num_experts=st.integers(1, 8),
        nbytes=st.sampled_from([NBYTES, 2 * NBYTES, 5 * NBYTES]),
    ),
    max_size=5,
    unique_by=lambda layer: layer.layer,
)
some_room = st.builds(
    Room,
    nbytes=st.none() | st.integers(0, 40 * NBYTES),
    slots=st.none() | st.integers(0, 9),
)


def pins_of(chosen: list[ExpertLayer]):
    """Pins that select some of the experts."""
    if not chosen:
        return st.just([])
    one = st.sampled_from(chosen).flatmap(
        lambda layer: st.builds(
            "layers.{}-9.experts.{}={}".format,
            st.just(layer.layer),
            st.integers(0, layer.num_experts - 1) | st.just("*"),
            st.sampled_from(TIERS),
        )
    )
    return st.lists(one.map(Pin.parse), max_size=3)


@st.composite
def cases(draw):
    """Arguments of ``place`` with three tiers, of which disk holds everything."""
    chosen = draw(some_layers)
    counts = {
        layer.layer: draw(
            st.lists(st.floats(0, 1e6), min_size=layer.num_experts, max_size=layer.num_experts)
        )
        for layer in chosen
        if draw(st.booleans())
    }
    room = {"accelerator": draw(some_room), "ram": draw(some_room), "disk": Room()}
    options = {
        "policy": draw(st.sampled_from(sorted(POLICIES))),
        "pins": draw(pins_of(chosen)),
        "counts": counts,
        "seed": draw(st.integers(0, 3)),
    }
    return chosen, room, options


def placed(case):
    """None where the pins alone are refused."""
    try:
        return place(case[0], case[1], **case[2])
    except (InvalidRequest, OutOfBudget) as error:
        assert case[2]["pins"], error
        return None


@given(cases())
def test_every_expert_has_one_tier_and_no_tier_has_more_than_its_room(case):
    placement = placed(case)
    assume(placement)
    chosen, room, _ = case
    assert {n: len(t) for n, t in placement.tiers.items()} == {
        layer.layer: layer.num_experts for layer in chosen
    }
    for tier, offered in room.items():
        counts = placement.counts(tier)
        nbytes = sum(counts[layer.layer] * layer.nbytes for layer in chosen)
        assert placement.nbytes(tier) == nbytes
        assert offered.nbytes is None or nbytes <= offered.nbytes
        assert offered.slots is None or all(n <= offered.slots for n in counts.values())
    assert placed(case) == placement


@given(cases())
def test_the_last_pin_that_selects_an_expert_decides(case):
    placement = placed(case)
    assume(placement)
    for layer, tiers in placement.tiers.items():
        for expert, tier in enumerate(tiers):
            matching = [p for p in case[2]["pins"] if p.selects(expert_key(layer, expert))]
            assert not matching or tier == matching[-1].tier


@given(cases(), st.integers(1, 20 * NBYTES))
def test_more_bytes_never_take_an_expert_away(case, more):
    chosen, room, options = case
    if room["accelerator"].nbytes is None:
        room["accelerator"] = dataclasses.replace(room["accelerator"], nbytes=more)
    before = placed(case)
    assume(before)
    larger = dataclasses.replace(room["accelerator"], nbytes=room["accelerator"].nbytes + more)
    after = place(chosen, {**room, "accelerator": larger}, **options)
    for layer in before.tiers:
        kept = set(before.experts(layer, "accelerator"))
        assert kept <= set(after.experts(layer, "accelerator"))


@given(cases())
def test_a_tier_stops_only_where_the_next_expert_does_not_fit(case):
    placement = placed(case)
    assume(placement)
    chosen, room, _ = case
    fast, counts = room["accelerator"], placement.counts("accelerator")
    pinned = [p for p in case[2]["pins"] if p.tier != "accelerator"]
    largest = max((layer.nbytes for layer in chosen), default=0)
    full = fast.nbytes is not None and placement.nbytes("accelerator") + largest > fast.nbytes
    for layer in chosen:
        away = sum(
            any(p.selects(expert_key(layer.layer, e)) for p in pinned)
            for e in range(layer.num_experts)
        )
        wanted = layer.num_experts if fast.slots is None else min(fast.slots, layer.num_experts)
        assert full or counts[layer.layer] >= wanted - away


def test_uniform_gives_each_layer_as_many_and_front_fills_layer_by_layer():
    room = {"accelerator": Room(nbytes=7 * NBYTES), "ram": Room()}
    uniform = place(layers(), room, policy="uniform")
    assert on("accelerator", uniform) == {0: (0, 1, 2), 1: (0, 1), 2: (0, 1)}
    front = place(layers(), room, policy="front")
    assert on("accelerator", front) == {0: (0, 1, 2, 3), 1: (0, 1, 2), 2: ()}
    assert on("ram", front) == {0: (), 1: (3,), 2: (0, 1, 2, 3)}


def test_uniform_counts_what_is_pinned():
    room = {"accelerator": Room(nbytes=6 * NBYTES), "ram": Room()}
    pins = [Pin.parse("layers.1.experts.1-3=accelerator")]
    placement = place(layers(), room, pins=pins)
    assert on("accelerator", placement) == {0: (0, 1), 1: (1, 2, 3), 2: (0,)}


def test_frequency_takes_the_most_selections_per_byte():
    counts = {0: [1, 9, 0, 0], 1: [20, 30, 25, 25]}  # shares: .1 .9 0 0 | .2 .3 .25 .25
    room = {"accelerator": Room(nbytes=3 * NBYTES), "ram": Room()}
    placement = place(layers(2), room, policy="frequency", counts=counts)
    assert on("accelerator", placement) == {0: (1,), 1: (1, 2)}
    assert placement.shares("accelerator", counts) == pytest.approx({0: 0.9, 1: 0.55})
    assert placement.shares("ram") == pytest.approx({0: 0.75, 1: 0.5})
    big = [dataclasses.replace(layers(2)[0], nbytes=4 * NBYTES), layers(2)[1]]
    placement = place(big, room, policy="frequency", counts=counts)
    assert on("accelerator", placement) == {0: (), 1: (1, 2, 3)}


def test_random_is_a_function_of_the_seed():
    room = {"accelerator": Room(nbytes=20 * NBYTES), "ram": Room()}
    chosen = layers(8, 16)
    first, again, other = (place(chosen, room, policy="random", seed=s) for s in (1, 1, 2))
    assert first == again != other
    counts = first.counts("accelerator").values()
    assert sum(counts) == 20 and len(set(counts)) > 1  # any expert, not so many of each layer


def test_none_and_all_on_the_accelerator():
    for policy in POLICIES:
        none = place(layers(), {"accelerator": Room(nbytes=0), "ram": Room()}, policy=policy,
                     counts={})  # fmt: skip
        assert none.counts("accelerator") == {0: 0, 1: 0, 2: 0}
        every = place(layers(), {"accelerator": Room(), "ram": Room(nbytes=0)}, policy=policy,
                      counts={})  # fmt: skip
        assert every.counts("accelerator") == {0: 4, 1: 4, 2: 4}
    assert place([], {"ram": Room()}).tiers == {}


def test_the_rest_goes_down_the_tiers_in_order():
    room = {
        "accelerator": Room(nbytes=2 * NBYTES),
        "ram": Room(slots=2),
        "disk": Room(),
    }
    placement = place(layers(2), room)
    assert on("accelerator", placement) == {0: (0,), 1: (0,)}
    assert on("ram", placement) == {0: (1, 2), 1: (1, 2)}
    assert on("disk", placement) == {0: (3,), 1: (3,)}


def test_what_cannot_be_is_refused_with_the_numbers():
    both = {"accelerator": Room(nbytes=2 * NBYTES), "ram": Room()}
    with pytest.raises(InvalidRequest, match="unknown placement policy 'best'; known: frequency"):
        place(layers(), both, policy="best")
    with pytest.raises(InvalidRequest, match="'frequency' needs measured selections"):
        place(layers(), both, policy="frequency")
    with pytest.raises(InvalidRequest, match=r"pin layers\.7=ram selects no expert.*layers 1 to 3"):
        place(layers(first=1), both, pins=[Pin.parse("layers.7=ram")])
    with pytest.raises(InvalidRequest, match=r"asks for disk, but .* only in: accelerator, ram"):
        place(layers(), both, pins=[Pin.parse("layers.0=disk")])
    with pytest.raises(OutOfBudget, match=r"layers\.0=accelerator: that puts into accelerator 16 "
                       "KiB of experts, it has 8 KiB"):  # fmt: skip
        place(layers(), both, pins=[Pin.parse("layers.0=accelerator")])
    with pytest.raises(OutOfBudget, match="4 experts of layer 0, it has 3 slots"):
        place(layers(), {"ram": Room(slots=3)})
    for bad in ([1.0] * 3, [1.0, 1.0, 1.0, -1.0], [1.0, 1.0, 1.0, math.nan]):
        with pytest.raises(InvalidRequest, match="counts of layer 1 should be 4 numbers"):
            place(layers(), both, counts={1: bad})


KEYS = [
    "embedding", "layers.0.experts", "layers.0.experts.2", "layers.3", "layers.3.attention.q_proj",
    "layers.3.experts.3", "layers.10.experts.1", "layers.33", "xlayers.3",
]  # fmt: skip


@pytest.mark.parametrize(
    ("selector", "selected"),
    [
        ("layers.0-9.experts", [1, 2, 5]),
        ("layers.3", [3, 4, 5]),
        ("layers.*.experts.2-3", [2, 5]),
        ("*", list(range(9))),
        (r"/layers\.(3|0)\.exp.*/", [1, 2, 5]),
        (r"/layers\.[1-9]+/", [3, 4, 5, 7]),
    ],
)
def test_a_selector_selects_keys_and_all_below(selector, selected):
    pin = Pin.parse(f" {selector} = ram")
    assert str(pin) == f"{selector}=ram" and pin.tier == "ram"
    assert [n for n, key in enumerate(KEYS) if pin.selects(key)] == selected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers.0", "is not a pin; write for example"),
        ("=ram", "is not a pin"),
        ("layers.0=gpu", "'gpu' in 'layers.0=gpu' is not a tier; those are accelerator, ram, disk"),
        ("layers.9-0=ram", "the range 9-0 in .* is empty; write 0-9"),
        ("layers..experts=ram", "'' in .* selects nothing"),
        ("layers.1,2=ram", "'1,2' in .* selects nothing"),
        ("/layers.(/=ram", r"/layers.\(/ is not a regular expression"),
    ],
)
def test_what_is_no_pin(text, message):
    with pytest.raises(InvalidRequest, match=message):
        Pin.parse(text)
