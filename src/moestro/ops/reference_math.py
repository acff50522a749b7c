"""Formulas that ops of the reference share: turning channel pairs, and scoring experts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moestro.core.errors import InvalidRequest, UnsupportedOp
from moestro.ops.contracts import SCORINGS


def turned(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """x [..., rotary_dim] with its channel pairs turned; cos, sin [..., rotary_dim / 2]."""
    result = torch.empty_like(x)
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        result[..., 0::2], result[..., 1::2] = a * cos - b * sin, b * cos + a * sin
    else:
        a, b = x.chunk(2, dim=-1)
        torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1, out=result)
    return result


def scored(logits: Tensor, scoring: str) -> Tensor:
    """Scores [T, E] of logits. Raises InvalidRequest for rows that have none."""
    if scoring not in SCORINGS:
        raise UnsupportedOp(f"route: scoring {scoring}; the reference has {', '.join(SCORINGS)}")
    for row, top in enumerate(logits.amax(1).tolist()):
        if not math.isfinite(top):
            raise InvalidRequest(
                f"route: the logits of row {row} hold NaN or have no finite maximum"
            )
    return logits.sigmoid() if scoring == "sigmoid" else logits.softmax(1)


def in_top_groups(choice: Tensor, groups: int, top_groups: int, *, best: int) -> Tensor:
    """choice [T, E], -inf outside the groups whose ``best`` largest sum to most."""
    parts = choice.view(len(choice), groups, -1)
    value = parts.topk(min(best, parts.shape[2]), dim=2).values.sum(2)
    kept = value.sort(dim=1, descending=True, stable=True).indices[:, :top_groups]
    hidden = torch.ones_like(value, dtype=torch.bool).scatter_(1, kept, False)
    return parts.masked_fill(hidden[:, :, None], -torch.inf).flatten(1)
