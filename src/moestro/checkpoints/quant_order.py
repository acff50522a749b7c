"""The order of a quantized weight's input channels, where groups are not runs of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moestro.checkpoints.quantized import QuantizedInfo, Read
from moestro.core.errors import CheckpointError


def input_order(info: QuantizedInfo, read: Read) -> npt.NDArray[np.int32] | None:
    """int32 [K], the input channels in the order of their groups, within one ascending; None if
    that is how they lie.

    Reads the weight's assignment of channels to groups, if it has one (activation order: GPTQ's
    ``g_idx``, arXiv:2210.17323). Raises CheckpointError for groups that do not exist or are not as
    wide as the group size says.
    """
    part = info.parts.get("g_idx") or info.parts.get("weight_g_idx")
    if part is None:
        return None
    values = read(part).numpy().view(np.int32)
    ascending = np.arange(info.shape[1]) // (info.scheme.group_size or info.shape[1])
    if np.array_equal(values, ascending):
        return None
    if part.name.endswith("weight_g_idx") and (values == -1).all():  # the initial value: not used
        return None
    if values.min() < 0 or values.max() >= info.groups:
        raise CheckpointError(
            f"{part.name} assigns channels to groups {values.min()} to {values.max()}, but there "
            f"are {info.groups}; the checkpoint is corrupt"
        )
    order = np.argsort(values, kind="stable").astype(np.int32)
    if not np.array_equal(values[order], ascending):
        raise CheckpointError(
            f"{part.name} does not assign {info.scheme.group_size} input channels to each group; "
            "the checkpoint is corrupt"
        )
    return order
