"""Weights whose packed columns are not in the order of their input (GPTQ's activation order).

Such a checkpoint gives each input channel to a group of its own choice. Tiles hold the channels in
the order of their groups, and the input is brought into that order when it is prepared. The orders
are vectors of their own: found beside the weights, stored beside them in a packed model, and put
into the weights when all are loaded. The order that an expert's down wants costs nothing: gate and
up are packed with their output channels in it.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moestro.checkpoints.base import Checkpoint, TensorInfo
from moestro.checkpoints.quant_order import input_order
from moestro.checkpoints.quantized import QuantizedInfo
from moestro.core.errors import UnsupportedFormat
from moestro.formats.base import PackedWeight
from moestro.memory.expert_bank import ExpertBank
from moestro.memory.sources import ExpertsSource, Part, Resolved, Source
from moestro.memory.weights import WeightSpec

_SUFFIX = ".input_order"

_Ints = NDArray[np.int32]


def order_spec(spec: WeightSpec) -> WeightSpec:
    """The vector with the order of a matrix's input [K], or of an expert bank's [E, hidden]."""
    shape = spec.shape[1:] if spec.kind == "matrix" else (spec.shape[0], spec.shape[2])
    return WeightSpec(
        key=spec.key + _SUFFIX, kind="vector", role=spec.role, shape=shape, layer=spec.layer
    )


def with_orders(checkpoint: Checkpoint, found: Sequence[Resolved]) -> list[Resolved]:
    """What was found, and the order of each weight that has one.

    Raises CheckpointError for assignments to groups that are corrupt, UnsupportedFormat for orders
    that cannot be followed.
    """
    orders: list[Resolved] = []
    for item in found:
        if isinstance(item, Source):
            orders += _matrix_order(checkpoint, item)
        else:
            biased = any(other.spec.key == f"{item.spec.key}.down_bias" for other in found)
            orders += _expert_orders(checkpoint, item, biased)
    return [*found, *orders]


def attach_orders(weights: MutableMapping[str, PackedWeight | Tensor | ExpertBank]) -> None:
    """Put loaded orders into the weights they belong to. Raises CheckpointError for a vector that
    is no order.
    """
    for key in [key for key in weights if key.endswith(_SUFFIX)]:
        vector, owner = weights.pop(key), weights[key.removesuffix(_SUFFIX)]
        orders = cast(Tensor, vector).to(torch.int32)
        if isinstance(owner, ExpertBank):
            owner.set_input_orders(orders)
        elif isinstance(owner, PackedWeight):
            weights[key.removesuffix(_SUFFIX)] = PackedWeight(
                format=owner.format,
                rows=owner.rows,
                cols=owner.cols,
                data=owner.data,
                name=owner.name,
                input_order=orders,
            )


def _order(checkpoint: Checkpoint, info: TensorInfo, ordered: bool) -> _Ints | None:
    if not isinstance(info, QuantizedInfo) or not ordered:
        return None
    return input_order(info, lambda part: checkpoint.read(part.name))


def _source(spec: WeightSpec, info: TensorInfo, values: _Ints) -> Source:
    parts = cast(QuantizedInfo, info).parts
    part = parts.get("g_idx") or parts["weight_g_idx"]
    vector = torch.from_numpy(values.astype(np.float32))
    return Source(spec=order_spec(spec), info=part, format=None, values=vector)


def _matrix_order(checkpoint: Checkpoint, item: Source) -> Iterator[Source]:
    order = _order(checkpoint, item.info, item.ordered)
    if order is not None:
        yield _source(item.spec, item.info, order)


def _expert_orders(checkpoint: Checkpoint, item: ExpertsSource, biased: bool) -> Iterator[Source]:
    def orders(part: Part) -> list[_Ints | None]:
        found = [_order(checkpoint, info, part.ordered(e)) for e, info in enumerate(part.infos)]
        return found * item.num_experts if part.stacked else found

    gate, up, down = (orders(part) for part in item.parts)
    where = f"{checkpoint.path}: {item.spec.key}"
    if any(order is not None for order in down):
        quantized = all(isinstance(i, QuantizedInfo) for part in item.parts for i in part.infos)
        if biased or not quantized:
            raise _refuse(where, "the input channels of down are not in the order of their groups")
    for e, (one, other) in enumerate(zip(gate, up, strict=True)):
        if not np.array_equal(_or_ascending(one, item), _or_ascending(other, item)):
            raise _refuse(where, f"gate and up of expert {e} want their input in different orders")
    if any(order is not None for order in gate):
        stacked = np.stack([_or_ascending(order, item) for order in gate])
        first = next(e for e, order in enumerate(gate) if order is not None)
        yield _source(item.spec, item.parts[0].infos[first], stacked)


def _or_ascending(order: _Ints | None, item: ExpertsSource) -> _Ints:
    return np.arange(item.spec.shape[2], dtype=np.int32) if order is None else order


def _refuse(where: str, what: str) -> UnsupportedFormat:
    return UnsupportedFormat(
        f"{where}: {what} (desc_act, activation order), which is not read; quantize them anew: "
        "moestro convert MODEL OUT --format experts=NAME, or open a checkpoint with desc_act=false"
    )
