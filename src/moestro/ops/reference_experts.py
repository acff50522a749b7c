"""The experts' ops of the reference (see ``ops.reference``)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from moestro.core.errors import InvalidRequest, UnsupportedOp
from moestro.ops.contracts import ExpertTable, SharedExperts
from moestro.ops.dispatch import PythonOps, op


class ExpertOps(PythonOps):
    """``moe`` and its halves, in ``compute_dtype``."""

    def __init__(self, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.compute_dtype = compute_dtype

    def _wide(self, x: Tensor) -> Tensor:
        return x.to(self.compute_dtype)

    @op
    def moe(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: ExpertTable,
        out: Tensor,
        rows: Tensor,
        *,
        shared: SharedExperts | None = None,
        accumulate: bool = False,
    ) -> None:
        n = live_rows(rows, x, ids, weights, out)
        total = torch.zeros(n, x.shape[1], dtype=self.compute_dtype)
        if accumulate:
            total += self._wide(out[:n])
        self._add_experts(total, x, ids, weights, experts)
        if shared is not None:
            live_rows(rows, shared.ids, shared.weights)
            self._add_experts(total, x, shared.ids, shared.weights, shared.experts)
        out[:n] = total

    def _add_experts(
        self, total: Tensor, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertTable
    ) -> None:
        n = total.shape[0]
        chosen = _chosen(ids[:n], experts)
        tokens = self._wide(x[:n])
        for expert in sorted(set(chosen[chosen >= 0].tolist())):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            share = self._wide(weights[:n])[token, slot, None]
            total.index_add_(0, token, share * self._expert(tokens[token], experts, expert))

    def _expert(self, x: Tensor, experts: ExpertTable, index: int) -> Tensor:
        """What one expert gives for x [n, H]."""
        activation, biases = activation_named(experts.activation), experts.biases
        gate, up, down = (self._wide(part.unpack()) for part in experts.expert(index))
        products = [x @ gate.T, x @ up.T]
        if biases is not None:
            products[0] += self._wide(biases.gate[index])
            products[1] += self._wide(biases.up[index])
        result = activation(*products) @ down.T
        return result if biases is None else result + self._wide(biases.down[index])

    @op
    def moe_slots(
        self, x: Tensor, ids: Tensor, experts: ExpertTable, y: Tensor, rows: Tensor
    ) -> None:
        n = live_rows(rows, x, ids, y)
        chosen, tokens = _chosen(ids[:n], experts), self._wide(x[:n])
        for expert in _present(chosen, experts):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            y[token, slot] = self._expert(tokens[token], experts, expert).float()

    @op
    def combine_experts(
        self,
        y: Tensor,
        ids: Tensor,
        weights: Tensor,
        out: Tensor,
        rows: Tensor,
        *,
        accumulate: bool = False,
    ) -> None:
        n = live_rows(rows, y, ids, weights, out)
        total = torch.zeros(n, y.shape[2], dtype=self.compute_dtype)
        if accumulate:
            total += self._wide(out[:n])
        chosen = ids[:n].long()
        for expert in sorted(set(chosen[chosen >= 0].tolist())):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            share = self._wide(weights[:n])[token, slot, None]
            total.index_add_(0, token, share * self._wide(y[token, slot]))
        out[:n] = total

    @op
    def copy_slots(
        self, source: Tensor, ids: Tensor, experts: ExpertTable, out: Tensor, rows: Tensor
    ) -> None:
        n = live_rows(rows, source, ids, out)
        chosen = _chosen(ids[:n], experts)
        for expert in _present(chosen, experts):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            out[token, slot] = source[token, slot]

    @op
    def copy_rows(self, x: Tensor, out: Tensor, rows: Tensor) -> None:
        n = live_rows(rows, x, out)
        out[:n] = x[:n]


def _chosen(ids: Tensor, experts: ExpertTable) -> Tensor:
    """ids as indices, none of them beyond the table."""
    chosen, count = ids.long(), experts.pointers.shape[0]
    require_range("expert id", chosen.clamp(min=0), count, "the layer's experts")
    return chosen


def _present(chosen: Tensor, experts: ExpertTable) -> list[int]:
    """Those of the chosen experts that are in memory here."""
    return [e for e in sorted(set(chosen[chosen >= 0].tolist())) if int(experts.pointers[e])]


def swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    """The clamped SwiGLU of ``contracts.ACTIVATIONS``."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * (1.702 * gate).sigmoid() * (up + 1)


_GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: silu(gate) * up,
    "gelu": lambda gate, up: gelu(gate) * up,
    "gelu_tanh": lambda gate, up: gelu(gate, approximate="tanh") * up,
    "relu": lambda gate, up: relu(gate) * up,
    "swiglu_oai": swiglu_oai,
}


def activation_named(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """What an expert makes of (gate, up). Raises UnsupportedOp listing the known names."""
    if name not in _GATES:
        raise UnsupportedOp(f"moe: activation {name!r}; the reference has {', '.join(_GATES)}")
    return _GATES[name]


def live_rows(rows: Tensor, *buffers: Tensor) -> int:
    """The live row count, checked against the capacity of every buffer."""
    n, capacity = int(rows), min(buffer.shape[0] for buffer in buffers)
    if not 0 <= n <= capacity:
        raise InvalidRequest(f"{n} live rows in buffers that hold {capacity}")
    return n


def require_range(what: str, values: Tensor, stop: int, of: str) -> None:
    """Raise InvalidRequest unless all values lie in [0, stop)."""
    bad = values[(values < 0) | (values >= stop)]
    if bad.numel():
        raise InvalidRequest(f"{what} {int(bad[0])} is outside {of}, which has 0..{stop - 1}")
