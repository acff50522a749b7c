"""What weights a model consists of, declared by its model file and followed by loader and convert.

A model file yields one WeightSpec per weight, in execution order; the loader turns each into a
PackedWeight, a float32 vector or an ExpertBank, and ``convert`` writes the same things to disk. So
neither knows any architecture, and a model file never reads a file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Role = Literal["embedding", "lm_head", "attention", "dense", "shared", "router", "experts", "norm"]


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """One weight of a model.

    key: the model's own name of it, for example ``layers.3.attention.q_proj``.
    kind: ``vector`` (float32 [N]: norms, biases), ``matrix`` ([N, K], packed), ``experts``
    (a bank of E experts; shape is (E, intermediate_size, hidden_size)).
    role: what format policies select by.
    sources: for ``vector`` and ``matrix`` the candidate tensor names, first present wins. For
    ``experts`` a mapping is in ``expert_sources`` instead.
    head_rows: other tensors that hold a matrix among rows of something else, tried after
    ``sources``; each head's rows of a matrix may then also be stacked, [heads, N / heads, K].
    unpermute_heads: for GGUF llama-family q/k: number of heads whose rows are interleaved and must
    be brought back to the half-rotation order (0: leave).
    optional: absent is fine (the key is then missing from the loaded weights).
    activation: of experts, one of ``ops.contracts.ACTIVATIONS``.
    """

    key: str
    kind: Literal["vector", "matrix", "experts"]
    role: Role
    shape: tuple[int, ...]
    sources: tuple[str, ...] = ()
    expert_sources: ExpertSources | None = None
    head_rows: HeadRows | None = None
    unpermute_heads: int = 0
    optional: bool = False
    layer: int = -1
    activation: str = "silu"


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """Tensors [heads * rows, cols] of which a matrix is ``count`` rows from ``first`` on of every
    head's ``rows``.

    transposed: each head's [count, cols] is [cols, count] in the matrix.
    """

    sources: tuple[str, ...]
    heads: int
    rows: int
    first: int
    count: int
    transposed: bool = False

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Of such a tensor, for a matrix of this shape."""
        return self.heads * self.rows, shape[0] // self.heads if self.transposed else shape[1]


@dataclass(frozen=True, kw_only=True)
class ExpertSources:
    """Candidate tensor names of a layer's experts; ``{e}`` in a name is the expert's index.

    gate, up, down: per-expert names (with ``{e}``) of [I, H], [I, H], [H, I], or stacked names
    (without) of [E, I, H], [E, I, H], [E, H, I].
    gate_up: fused names, stacked [E, 2I, H] with gate first.
    layout: ``rows`` as above. ``interleaved_transposed``: gate and up channels alternate in fused
    tensors, and float ones are transposed, fused [E, H, 2I] and down [E, I, H].
    """

    gate: tuple[str, ...] = ()
    up: tuple[str, ...] = ()
    down: tuple[str, ...] = ()
    gate_up: tuple[str, ...] = field(default=())
    layout: Literal["rows", "interleaved_transposed"] = "rows"
