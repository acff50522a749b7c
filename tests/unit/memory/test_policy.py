"""Which format a weight gets."""

import pytest

from moestro import formats
from moestro.core.errors import InvalidRequest, UnsupportedFormat
from moestro.memory.policy import FormatPolicy


def chosen(policy: FormatPolicy, key="layers.0.x", role="attention", source="BF16") -> str:
    return policy.format_for(key, role, source).name


def test_an_empty_policy_keeps_every_type():
    policy = FormatPolicy.parse("")
    assert policy.is_empty
    assert [chosen(policy, source=s) for s in ("BF16", "F16", "Q4_K", "Q8_0")] == [
        "bf16", "f16", "k4", "int8-g32",
    ]  # fmt: skip


def test_an_empty_policy_refuses_what_it_cannot_keep():
    with pytest.raises(UnsupportedFormat, match="Q1_0"):
        chosen(FormatPolicy.parse(""), source="Q1_0")


def test_a_format_that_only_holds_is_chosen_for_what_it_holds_alone():
    policy = FormatPolicy.parse("experts=iq2xxs")
    assert chosen(policy, role="experts", source="IQ2_XXS") == "iq2xxs"
    with pytest.raises(UnsupportedFormat, match=r"iq2xxs cannot hold BF16.*not quantized to it"):
        chosen(policy, role="experts", source="BF16")


def test_one_name_is_for_all_matrices():
    policy = FormatPolicy.parse("int4-g32")
    roles = ("embedding", "lm_head", "attention", "dense", "shared", "experts")
    assert {chosen(policy, role=role) for role in roles} == {"int4-g32"}


def test_an_integer_default_leaves_the_router_but_a_float_one_or_its_own_name_does_not():
    assert chosen(FormatPolicy.parse("int4-g32"), role="router") == "bf16"
    assert chosen(FormatPolicy.parse("f32"), role="router") == "f32"
    assert chosen(FormatPolicy.parse("int4-g32,router=int8-g32"), role="router") == "int8-g32"


def test_roles_and_patterns_come_before_the_default_and_the_last_pattern_wins():
    policy = FormatPolicy.parse(" int4-g32, attention = bf16 ,layers.0.*=k6,*.down=int8-g32 ")
    assert chosen(policy, key="layers.1.x", role="experts") == "int4-g32"
    assert chosen(policy, key="layers.1.x", role="attention") == "bf16"
    assert chosen(policy, key="layers.0.x", role="attention") == "k6"
    assert chosen(policy, key="layers.0.experts.down", role="experts") == "int8-g32"


def test_the_default_conversion_quantizes_floats_and_keeps_what_is_quantized():
    policy = FormatPolicy.for_conversion()
    assert chosen(policy, role="experts") == formats.DEFAULT
    assert chosen(policy, role="experts", source="Q6_K") == "k6"
    assert chosen(policy, role="router", source="F32") == "f32"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("int5", UnsupportedFormat, "unknown format 'int5'"),
        ("experts=fp3", UnsupportedFormat, "fp3"),
        ("norm=bf16", InvalidRequest, "'norm'.*is not a kind of weight.*experts"),
        ("expert=int4-g32", InvalidRequest, "'expert'.*is not a kind of weight"),
        ("int4-g32,bf16", InvalidRequest, "two formats for everything"),
    ],
)
def test_mistakes_are_named(text, error, message):
    with pytest.raises(error, match=message):
        FormatPolicy.parse(text)


def test_a_policy_prints_what_it_was_parsed_from():
    assert str(FormatPolicy.parse("int4-g32,experts=k4,a.*=f16")) == "int4-g32,experts=k4,a.*=f16"
    assert str(FormatPolicy.parse("")) == "as stored"
