"""A matrix as it lies in a checkpoint, ready to be packed by ranges of output channels.

Bytes of one tensor, row by row or column by column, or codes with scales that a quantized
checkpoint keeps in several tensors. Each says which formats hold it without loss, packs into these,
and decodes for all others. By numpy, because torch would start threads of its own in each of the
packing ones.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moestro import formats
from moestro.checkpoints.quant_codes import Codes
from moestro.formats.base import Format
from moestro.memory.sources import FLOAT_TYPES
from moestro.memory.weights import HeadRows

# Checkpoint types that packers take as they are.
_FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StoredRows(Protocol):
    """A matrix [N, K] that has been read."""

    def exact(self, format_: Format) -> bool:
        """``pack`` can be used."""
        ...

    def at_once(self, format_: Format) -> bool:
        """The native packers read it as it lies, so all of it is best packed in one call."""
        ...

    def pack(
        self, format_: Format, start: int, stop: int, out: Tensor, *, alone: bool = False
    ) -> None:
        """Output channels [start, stop) packed without loss into ``out``, uint8. alone: in the
        calling thread.
        """
        ...

    def floats(self, start: int, stop: int) -> Tensor:
        """Output channels [start, stop) as floats of any type, [stop - start, K]."""
        ...


class RawRows:
    """``raw``: the bytes (uint8) of N rows of K channels of a checkpoint type."""

    def __init__(self, dtype: str, raw: Tensor, rows: int, cols: int) -> None:
        self.dtype, self.cols = dtype, cols
        self._rows: NDArray[Any] = raw.view(rows, -1).numpy()

    def exact(self, format_: Format) -> bool:
        return self.dtype in format_.exact_from

    def at_once(self, format_: Format) -> bool:
        readable = self.exact(format_) or self.dtype in _FLOAT_DTYPES
        return readable and format_.packs_natively(self.dtype)

    def pack(
        self, format_: Format, start: int, stop: int, out: Tensor, *, alone: bool = False
    ) -> None:
        raw = self._bytes(start, stop)
        format_.pack_exact(self.dtype, raw, stop - start, self.cols, out=out, alone=alone)

    def floats(self, start: int, stop: int) -> Tensor:
        raw = self._bytes(start, stop)
        if self.dtype in _FLOAT_DTYPES:
            return raw.view(_FLOAT_DTYPES[self.dtype]).view(stop - start, self.cols)
        return to_float(self.dtype, raw, stop - start, self.cols)

    def _bytes(self, start: int, stop: int) -> Tensor:
        contiguous = np.ascontiguousarray(self._rows[start:stop])
        return torch.from_numpy(contiguous.view(np.uint8).reshape(-1))


class TransposedRows(RawRows):
    """``raw``: the bytes (uint8) of K rows of float numbers, of which every ``count``-th from
    ``index`` on belongs to one of the N channels.
    """

    def __init__(self, dtype: str, raw: Tensor, cols: int, *, index: int, count: int) -> None:
        self.dtype, self.cols = dtype, cols
        elements = raw.numpy().view(f"i{FLOAT_TYPES[dtype]}").reshape(cols, -1)
        self._rows = elements[:, index::count].T


class CodedRows:
    """Codes of the format ``dtype``.

    ``named``: the user asked for the format by name, so scales that it cannot hold are fitted anew;
    else they are refused. ``ordered``: columns stay in the order of the codes, else they come in
    that of the input.
    """

    def __init__(self, dtype: str, codes: Codes, *, named: bool, ordered: bool) -> None:
        self.dtype, self.codes = dtype, codes
        #: int64 [K], the input channel of each column, or None where that is ascending
        self.order = codes.order if ordered else None
        self._fit = named and not codes.scales_are_exact

    def exact(self, format_: Format) -> bool:
        return self.dtype == format_.name and not self._fit

    def at_once(self, format_: Format) -> bool:
        return False

    def pack(
        self, format_: Format, start: int, stop: int, out: Tensor, *, alone: bool = False
    ) -> None:
        codes, zeros = self.codes, self.codes.zeros
        packed = format_.pack_codes(
            codes.codes[start:stop],
            codes.scales[start:stop],
            None if zeros is None else zeros[start:stop],
            None if codes.factors is None else codes.factors[start:stop],
        )
        out.copy_(packed)

    def floats(self, start: int, stop: int) -> Tensor:
        values = self.codes.floats(start, stop)
        return self.codes.restored(values) if self.order is None else values

    def arranged(self, importance: Tensor | None) -> Tensor | None:
        """The importance of input channels [K] in the order of the columns."""
        if importance is None or self.order is None:
            return importance
        return importance[self.order]


def pick_head_rows(rows: StoredRows, picked: HeadRows) -> RawRows:
    """The meant rows of every head as one matrix of floats, of the stored type if that is one."""
    values = rows.floats(0, picked.heads * picked.rows)
    names = {dtype: name for name, dtype in _FLOAT_DTYPES.items()}
    bits = values.contiguous().view(torch.uint8).numpy().view(f"i{values.element_size()}")
    parts = bits.reshape(picked.heads, picked.rows, -1)
    parts = parts[:, picked.first : picked.first + picked.count]
    if picked.transposed:
        parts = parts.transpose(0, 2, 1)
    parts = np.ascontiguousarray(parts)
    raw = torch.from_numpy(parts.reshape(-1).view(np.uint8))
    return RawRows(names[values.dtype], raw, parts.shape[0] * parts.shape[1], parts.shape[2])


def to_float(dtype: str, raw: Tensor, rows: int, cols: int) -> Tensor:
    """Checkpoint bytes -> float32 [rows, cols]; quantized types by their exact format."""
    if dtype not in FLOAT_TYPES:
        exact = formats.exact_for(dtype)
        return exact.unpack(exact.pack_exact(dtype, raw, rows, cols), rows, cols)
    data = raw.contiguous().numpy()
    if dtype == "BF16":  # the upper half of a float32
        wide = (data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite: refused later
            wide = data.view(f"f{FLOAT_TYPES[dtype]}").astype(np.float32)
    return torch.from_numpy(wide).view(rows, cols)
