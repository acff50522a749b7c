"""The ops of ``ops.contracts`` on the native kernels: each call unpacks its arguments and hands
them to the extension module, which checks shapes (InvalidRequest, UnsupportedOp) and either runs
the op at once on the thread team or records it.

Tensors must be contiguous and of the contract's dtype; nothing is copied or converted to fit
(TypeError).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor

from moestro import _core as core
from moestro.core.errors import UnsupportedOp
from moestro.devices.cpu.slot_ops import SlotOps, biases, expert_table, projections
from moestro.ops.contracts import (
    Batch,
    ExpertTable,
    KvLayer,
    LatentKvLayer,
    Packed,
    SharedExperts,
)
from moestro.ops.dispatch import OP_NAMES, unsupported


class CpuProgram:
    """Ops recorded into a native program. It keeps alive every buffer that they point into."""

    def __init__(self) -> None:
        self._native = core.Program()
        self._kept: list[object] = []

    def __len__(self) -> int:
        return len(self._native)

    @property
    def native(self) -> Any:
        """The native program that ops are recorded into."""
        return self._native

    def keep(self, owner: object) -> None:
        """Keep an owner of memory that a recorded op reaches by address."""
        self._kept.append(owner)

    def replay(self) -> None:
        """Run all recorded ops once as one job of the thread team, without the GIL.

        Programs replayed from several Python threads run one after the other.
        """
        self._native.replay()


class _Recording(threading.local):
    """The program that the calling thread is recording, if any."""

    program: CpuProgram | None = None


class CpuOps(SlotOps):
    """All ops of ``contracts.Ops``; see there for shapes and meaning."""

    #: name of the device these ops run on, for error messages
    device = "cpu"

    def __init__(self) -> None:
        self._recording = _Recording()

    def __getattr__(self, name: str) -> NoReturn:
        if name in OP_NAMES:
            raise unsupported(name, self.device, frozenset(dir(type(self))))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @contextmanager
    def record(self) -> Iterator[CpuProgram]:
        """While open, ops that this Python thread calls are recorded into the yielded program and
        not run; shapes are checked then, data when it is replayed.

        Raises UnsupportedOp when a program is already open: recordings do not nest.
        """
        if self._recording.program is not None:
            raise UnsupportedOp(f"device {self.device} is already recording a program here")
        program = self._new_program()
        self._recording.program = program
        try:
            yield program
        finally:
            self._recording.program = None

    def _new_program(self) -> CpuProgram:
        return CpuProgram()

    @property
    def _program(self) -> Any:
        program = self._recording.program
        return None if program is None else program.native

    def embed_tokens(self, token_ids: Tensor, weight: Packed, out: Tensor, rows: Tensor) -> None:
        _require_input_order("embed_tokens", weight)
        core.embed_tokens(
            self._program,
            token_ids,
            weight.format_name,
            weight.data,
            weight.rows,
            weight.cols,
            out,
            rows,
        )

    def gather_rows(self, x: Tensor, indices: Tensor, out: Tensor, rows: Tensor) -> None:
        core.gather_rows(self._program, x, indices, out, rows)

    def rmsnorm(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        rows: Tensor,
        *,
        eps: float,
        groups: int = 1,
        residual: Tensor | None = None,
    ) -> None:
        core.rmsnorm(self._program, x, weight, out, rows, eps=eps, groups=groups, residual=residual)

    def linear(
        self,
        x: Tensor,
        weight: Packed,
        out: Tensor,
        rows: Tensor,
        *,
        bias: Tensor | None = None,
        accumulate: bool = False,
    ) -> None:
        core.linear(
            self._program,
            x,
            weight.format_name,
            weight.data,
            weight.rows,
            weight.cols,
            out,
            rows,
            bias=bias,
            input_order=weight.input_order,
            accumulate=accumulate,
        )

    def linear_heads(
        self, x: Tensor, weight: Packed, out: Tensor, rows: Tensor, *, heads: int
    ) -> None:
        _require_input_order("linear_heads", weight)
        core.linear_heads(
            self._program,
            x,
            weight.format_name,
            weight.data,
            weight.rows,
            weight.cols,
            out,
            rows,
            heads=heads,
        )

    def rope(
        self,
        x: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        rows: Tensor,
        *,
        heads: int,
        interleaved: bool = False,
        offset: int = 0,
    ) -> None:
        core.rope(
            self._program,
            x,
            positions,
            cos,
            sin,
            rows,
            heads=heads,
            interleaved=interleaved,
            offset=offset,
        )

    def write_kv(self, k: Tensor, v: Tensor, cache: KvLayer, batch: Batch) -> None:
        core.write_kv(
            self._program,
            k,
            v,
            cache.k,
            cache.v,
            cache.k_scale,
            cache.v_scale,
            batch.positions,
            batch.slots,
            batch.page_table,
            batch.rows,
        )

    def attention(
        self,
        q: Tensor,
        cache: KvLayer,
        out: Tensor,
        batch: Batch,
        *,
        heads: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> None:
        core.attention(
            self._program,
            q,
            cache.k,
            cache.v,
            cache.k_scale,
            cache.v_scale,
            out,
            batch.positions,
            batch.slots,
            batch.page_table,
            batch.rows,
            heads=heads,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )

    def write_latent(
        self,
        kv: Tensor,
        norm: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LatentKvLayer,
        batch: Batch,
        *,
        eps: float,
        interleaved: bool = False,
    ) -> None:
        core.write_latent(
            self._program,
            kv,
            norm,
            cos,
            sin,
            cache.rows,
            batch.positions,
            batch.slots,
            batch.page_table,
            batch.rows,
            eps=eps,
            interleaved=interleaved,
        )

    def latent_attention(
        self,
        q: Tensor,
        absorbed: Tensor,
        cache: LatentKvLayer,
        out: Tensor,
        batch: Batch,
        *,
        heads: int,
        scale: float,
    ) -> None:
        core.latent_attention(
            self._program,
            q,
            absorbed,
            cache.rows,
            out,
            batch.positions,
            batch.slots,
            batch.page_table,
            batch.rows,
            heads=heads,
            rank=cache.rank,
            scale=scale,
        )

    def route(
        self,
        logits: Tensor,
        ids: Tensor,
        weights: Tensor,
        rows: Tensor,
        *,
        normalize: bool,
        scoring: str = "softmax",
        bias: Tensor | None = None,
        groups: int = 1,
        top_groups: int = 1,
        scale: float = 1.0,
    ) -> None:
        core.route(
            self._program,
            logits,
            ids,
            weights,
            rows,
            normalize=normalize,
            scoring=scoring,
            bias=bias,
            groups=groups,
            top_groups=top_groups,
            scale=scale,
        )

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
        others = None
        self._keep(experts)
        if shared is not None:
            self._keep(shared.experts)
            others = expert_table(shared.ids, shared.weights, shared.experts)
        core.moe(
            self._program,
            x,
            ids,
            weights,
            experts.pointers,
            projections(experts),
            experts.activation,
            out,
            rows,
            input_orders=experts.input_orders,
            **biases(experts),
            shared=others,
            accumulate=accumulate,
            cache=getattr(experts, "cache", None),
        )

    def _keep(self, experts: ExpertTable) -> None:
        """Keep the blobs alive that a recorded program points to."""
        if self._recording.program is not None:
            self._recording.program.keep(experts)

    def silu_mul(self, gate: Tensor, up: Tensor, out: Tensor, rows: Tensor) -> None:
        core.silu_mul(self._program, gate, up, out, rows)

    def sigmoid(self, x: Tensor, rows: Tensor) -> None:
        core.sigmoid(self._program, x, rows)


def _require_input_order(op: str, weight: Packed) -> None:
    if weight.input_order is not None:
        raise UnsupportedOp(f"{op}: a matrix whose columns are out of order has no kernel")
