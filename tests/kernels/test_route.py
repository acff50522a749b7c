"""Routers with sigmoid scores, choice biases and groups: against a plain oracle, on every ISA."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moestro import native
from moestro.core.errors import InvalidRequest, UnsupportedOp
from moestro.devices.cpu.ops import CpuOps
from moestro.ops.reference import ReferenceOps

OPS = CpuOps()
REFERENCE = ReferenceOps(torch.float64)
TOKENS = 9


@dataclass(frozen=True, kw_only=True)
class Rule:
    experts: int
    top_k: int
    scoring: str = "sigmoid"
    biased: bool = True
    groups: int = 1
    top_groups: int = 1
    normalize: bool = True
    scale: float = 1.0

    def bias(self) -> Tensor | None:
        generator = torch.Generator().manual_seed(self.experts)
        return torch.randn(self.experts, generator=generator) / 4 if self.biased else None

    def run(self, ops: CpuOps | ReferenceOps, logits: Tensor) -> tuple[Tensor, Tensor]:
        ids = torch.full((len(logits), self.top_k), -7, dtype=torch.int32)
        weights = torch.full((len(logits), self.top_k), -7.0)
        ops.route(
            logits,
            ids,
            weights,
            torch.tensor([len(logits)], dtype=torch.int32),
            normalize=self.normalize,
            scoring=self.scoring,
            bias=self.bias(),
            groups=self.groups,
            top_groups=self.top_groups,
            scale=self.scale,
        )
        return ids, weights


RULES = [
    Rule(experts=256, top_k=8, groups=8, top_groups=4, scale=2.5),
    Rule(experts=384, top_k=8, scale=2.827),
    Rule(experts=6, top_k=2, biased=False, normalize=False),
    Rule(experts=12, top_k=4, groups=12, top_groups=5),
    Rule(experts=20, top_k=4, groups=10, top_groups=2, normalize=False, scale=0.3),
    Rule(experts=20, top_k=5, groups=2, top_groups=2),
    Rule(experts=160, top_k=6, scoring="softmax", biased=False, groups=8, top_groups=3,
         normalize=False, scale=16.0),
    Rule(experts=64, top_k=6, scoring="softmax", biased=False, normalize=False),
    Rule(experts=21, top_k=3, scoring="softmax", groups=3, top_groups=2, scale=0.5),
    Rule(experts=7, top_k=7, scoring="softmax", scale=3.0),
]  # fmt: skip


def chosen_by_hand(rule: Rule, logits: list[float]) -> dict[int, float]:
    """Weights by id in order of choice, one number at a time."""
    if rule.scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    else:
        exps = [math.exp(v - max(logits)) for v in logits]
        scores = [e / sum(exps) for e in exps]
    bias = rule.bias()
    choice = [s + (0.0 if bias is None else float(bias[e])) for e, s in enumerate(scores)]
    size = rule.experts // rule.groups
    counted = 2 if rule.scoring == "sigmoid" else 1
    value = [
        sum(sorted(choice[g * size : (g + 1) * size], reverse=True)[:counted])
        for g in range(rule.groups)
    ]
    kept = sorted(range(rule.groups), key=lambda g: -value[g])[: rule.top_groups]
    eligible = [e for e in range(rule.experts) if e // size in kept]
    order = sorted(eligible, key=lambda e: -choice[e])[: rule.top_k]
    total = sum(scores[e] for e in order) if rule.normalize else 1.0
    return {e: scores[e] / total * rule.scale for e in order}


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_choice_and_weights(rule: Rule):
    logits = torch.randn(TOKENS, rule.experts, generator=torch.Generator().manual_seed(3)) * 2
    want = [chosen_by_hand(rule, row) for row in logits.tolist()]
    results = [rule.run(REFERENCE, logits)]
    for isa in native.supported_isas():
        native.set_isa(isa)
        results.append(rule.run(OPS, logits))
        assert torch.equal(results[1][0], results[-1][0])
        assert torch.equal(results[1][1], results[-1][1]), isa
    for ids, weights in results:
        assert ids.tolist() == [list(row) for row in want]
        expected = torch.tensor([list(row.values()) for row in want])
        torch.testing.assert_close(weights, expected, rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("ops", [OPS, REFERENCE], ids=["native", "reference"])
def test_the_bias_chooses_but_does_not_weigh(ops: CpuOps | ReferenceOps):
    rule = Rule(experts=4, top_k=2, normalize=False)
    bias = rule.bias()
    assert bias is not None
    ids, weights = rule.run(ops, torch.zeros(1, 4))
    assert ids[0].tolist() == bias.argsort(descending=True)[:2].tolist()
    assert weights[0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("ops", [OPS, REFERENCE], ids=["native", "reference"])
def test_equal_groups_and_experts_go_by_number(ops: CpuOps | ReferenceOps):
    rule = Rule(experts=12, top_k=4, groups=4, top_groups=2, biased=False)
    ids, _ = rule.run(ops, torch.zeros(2, 12))
    assert ids.tolist() == [[0, 1, 2, 3]] * 2


def test_sigmoids_that_vanish_have_no_weight_rather_than_nan():
    rule = Rule(experts=8, top_k=2, biased=False)
    for ops in (OPS, REFERENCE):
        _, weights = rule.run(ops, torch.full((1, 8), -1000.0))
        assert weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("rule", RULES[:4] + RULES[6:7], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, -1])
def test_rows_without_scores_are_refused(rule: Rule, bad: float, place: int):
    logits = torch.randn(3, rule.experts)
    logits[1, place] = bad
    for ops in (OPS, REFERENCE):
        with pytest.raises(InvalidRequest, match="logits of row 1"):
            rule.run(ops, logits)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule(experts=10, top_k=2, groups=3), "10 experts do not divide into 3 groups"),
        (Rule(experts=10, top_k=2, groups=5, top_groups=6), "top 6 of 5 groups"),
        (Rule(experts=10, top_k=5, groups=5, top_groups=2), "top 5 of 4 experts"),
        (Rule(experts=10, top_k=2, scoring="tanh"), "scoring tanh"),
    ],
)
def test_impossible_rules_are_refused(rule: Rule, message: str):
    for ops in (OPS, REFERENCE):
        with pytest.raises(UnsupportedOp, match=message):
            rule.run(ops, torch.zeros(1, 10))


def test_a_bias_of_another_size_is_refused():
    logits, ids, weights = (
        torch.zeros(1, 4),
        torch.zeros(1, 2, dtype=torch.int32),
        torch.zeros(1, 2),
    )
    with pytest.raises(InvalidRequest, match="route: bias is 3, expected 4"):
        OPS.route(
            logits, ids, weights, torch.ones(1, dtype=torch.int32), normalize=True,
            bias=torch.zeros(3),
        )  # fmt: skip
