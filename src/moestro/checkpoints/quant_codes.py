"""Reads the codes, scales and zero points of a quantized weight, in one form for all methods.

Sources of the layouts, low bits first in every 32-bit word:

gptq    ``qweight[i, n]`` holds input channels of output channel n: ``i * per_word + j`` at bit
        ``bits * j``; ``qzeros[g, m]`` likewise output channels. Version 1 stores zero points minus
        one, modulo 2^bits (AutoGPTQ, ``QuantLinear.pack``).
awq     ``qweight[k, m]`` and ``qzeros[g, m]`` hold output channels ``8 * m + ORDER[j]`` at bit 4j
        (AutoAWQ, ``WQLinear_GEMM.from_linear``).
gemv    ``qweight[n, i]`` and ``qzeros[n, i]`` hold eight input channels or groups of output channel
        n in ascending order; ``scales[n, g]`` is as wide as the zero points are when padded
        (AutoAWQ, ``WQLinear_GEMV.from_linear``).
packed  ``weight_packed[n, i]`` as gptq but along the rows; codes and zero points are signed and
        stored plus 2^(bits-1); zero points lie in words along the output channels
        (compressed-tensors, ``pack_to_int32``).
plain   signed bytes, or e4m3 bytes (arXiv:2209.05433) with a scale per block of both channels; in
inverse DeepSeek's naming (``weight_scale_inv``) it is multiplied by, too; scaled is its later one.
pairs   bytes of two e2m1 numbers along the row, the first in the low bits (compressed-tensors,
        ``pack_fp4_to_uint8``; also where a layout above holds e2m1); blocks: as that, 16 bytes per
        32 channels, for all experts at once (gpt-oss).
rows    signed bytes with the largest magnitude of each row, ``SCB``, for 127 (bitsandbytes int8).
nf4     indices into ``quant_map``, see ``quant_bitsandbytes``; fp4 likewise.
NVFP4 has e4m3 scales, times ``weight_scale_2`` (ModelOpt) or divided by ``weight_global_scale``
(compressed-tensors). Scales that are plain bytes are exponents of two with bias 127, 255 is NaN
(e8m0, OCP MX specification).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moestro.checkpoints.base import Checkpoint, TensorInfo
from moestro.checkpoints.quant_bitsandbytes import read_state, unnested, unpack
from moestro.checkpoints.quant_order import input_order
from moestro.checkpoints.quant_schemes import EXPONENT_SCALES, Element
from moestro.checkpoints.quantized import QuantizedInfo
from moestro.core.errors import CheckpointError

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]

#: output channel of each nibble of a word in AWQ's order
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, kw_only=True)
class Codes:
    """A weight [N, K] with value ``scale * (code - zero)``, or ``scale * number(code)``.

    codes: uint8 [N, K]. scales: float32 [N, G]. zeros: uint8 [N, G], or None if all of them are
    ``middle``. group: input channels per scale, at least K if G is 1. order: int64 [K] if the
    columns are not in the order of the input: column j belongs to input channel ``order[j]``.
    factors: float32 [N] that scales are multiplied by first, or None. table: float32 [16] of what
    codes stand for, if they are indices.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    middle: int
    group: int
    element: Element = "int"
    order: Tensor | None = None
    factors: Tensor | None = None
    table: Tensor | None = None

    @property
    def scales_are_exact(self) -> bool:
        """Every scale is a number of the type that weight formats keep it in: float16 beside
        integers; beside floats it is what the checkpoint has."""
        if self.element != "int":
            return True
        scales = self.scales.numpy()
        with np.errstate(over="ignore"):
            return bool(np.array_equal(scales.astype(np.float16).astype(np.float32), scales))

    def floats(self, start: int, stop: int) -> Tensor:
        """float32 values of output channels [start, stop), rounded once each."""
        bytes_ = self.codes[start:stop].numpy()
        if self.table is not None:
            codes = self.table.numpy()[bytes_]
        elif self.element == "int":
            codes = bytes_.astype(np.float32)
        else:
            codes = _e4m3()[bytes_] if self.element == "e4m3" else _E2M1[bytes_]
        group = np.arange(codes.shape[1]) // self.group
        scales = self.scales[start:stop].numpy()
        if self.factors is not None:
            scales = scales * self.factors[start:stop, None].numpy()
        scales = scales[:, group]
        if self.zeros is None:
            return torch.from_numpy((codes - np.float32(self.middle)) * scales)
        zeros = self.zeros[start:stop].numpy().astype(np.float32)[:, group]
        return torch.from_numpy((codes - zeros) * scales)

    def restored(self, values: Tensor) -> Tensor:
        """Columns [..., K] in the order of the input."""
        if self.order is None:
            return values
        out = torch.empty_like(values)
        out[..., self.order] = values
        return out

    def rows(self, which: slice | Tensor) -> Codes:
        """Some of the output channels, or all of them in another order."""
        zeros = None if self.zeros is None else self.zeros[which]
        factors = None if self.factors is None else self.factors[which]
        return replace(
            self, codes=self.codes[which], scales=self.scales[which], zeros=zeros, factors=factors
        )


#: e2m1 (sign, two bits of exponent with bias 1, one of mantissa) by code
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@cache
def _e4m3() -> _Floats:
    """float32 of every e4m3 byte; 0x7f and 0xff are NaN."""
    every = torch.arange(256, dtype=torch.uint8)
    return every.view(torch.float8_e4m3fn).to(torch.float32).numpy()


def read_codes(checkpoint: Checkpoint, info: QuantizedInfo, expert: int | None = None) -> Codes:
    """Read a quantized weight whole, or one of stacked experts.

    Groups are those of the weight format: where the stored ones are wider, scales and zero points
    are repeated. Channels come in the order of their groups. Raises CheckpointError for tensors
    that contradict each other.
    """
    return _Reader(checkpoint, info, expert).codes()


class _Reader:
    def __init__(self, checkpoint: Checkpoint, info: QuantizedInfo, expert: int | None) -> None:
        self.checkpoint, self.info, self.scheme = checkpoint, info, info.scheme
        self.rows, self.cols = info.shape[-2:]
        self._which = None if expert is None else (expert, expert + 1)
        self.middle = 0 if self.scheme.is_float else 1 << (self.scheme.bits - 1)

    def codes(self) -> Codes:
        order = input_order(self.info, self._read)
        codes = self._codes() if order is None else self._codes()[:, order]
        cols, stored = self.cols, self.scheme.group_size
        group = self.scheme.kernel_group or cols
        # Column g of the format is part of column g * group // stored of the checkpoint.
        columns = np.arange(-(-cols // group)) * group // (stored or cols)
        zeros = self._zeros()
        return Codes(
            codes=torch.from_numpy(np.ascontiguousarray(codes)),
            scales=torch.from_numpy(np.ascontiguousarray(self._scales()[:, columns])),
            zeros=None if zeros is None else torch.from_numpy(zeros[:, columns]),
            middle=self.middle,
            group=group,
            element=self.scheme.element,
            order=None if order is None else torch.from_numpy(order).long(),
            factors=self._factors(),
            table=self._table(),
        )

    def _read(self, part: TensorInfo) -> Tensor:
        return self.checkpoint.read(part.name, self._which)

    def _words(self, part: str) -> _Bytes:
        """The bytes of a matrix of 32-bit words: [rows, words, 4]."""
        info = self.info.parts[part]
        return self._read(info).numpy().reshape(*info.shape, 4)

    def _unpack(self, words: _Bytes) -> _Bytes:
        """Words [rows, words, bytes] -> codes [rows, codes], low bits first."""
        if self.scheme.bits == 8:
            return words.reshape(words.shape[0], -1)
        codes = np.stack([words & 15, words >> 4], axis=-1)
        return codes.reshape(words.shape[0], -1)

    def _codes(self) -> _Bytes:
        """uint8 [N, K]."""
        layout = self.scheme.layout
        if layout == "gptq":
            return self._unpack(self._words("qweight").transpose(1, 0, 2))
        if layout == "awq":
            return self._unpack_awq("qweight")
        if layout == "gemv":
            return self._unpack(self._words("qweight"))
        if layout == "packed":
            return self._unpack(self._words("weight_packed"))[:, : self.cols]
        if self.scheme.indexed:
            return unpack(self._read(self.info.parts["weight"]).numpy(), (self.rows, self.cols))
        part = next(p for p in ("blocks", "weight_packed", "weight") if p in self.info.parts)
        codes = self._read(self.info.parts[part]).numpy()
        if self.scheme.element == "e2m1":
            return self._unpack(codes.reshape(self.rows, -1, 1))
        codes = codes.reshape(self.rows, self.cols)
        return codes if self.scheme.is_float else codes ^ np.uint8(128)

    def _unpack_awq(self, part: str) -> _Bytes:
        """Words [x, N / 8] in AWQ's order -> [N, x]."""
        mixed = self._unpack(self._words(part)).reshape(-1, len(AWQ_ORDER))
        codes = np.empty_like(mixed)
        codes[:, AWQ_ORDER] = mixed
        return codes.reshape(-1, self.rows).T

    def _scales(self) -> _Floats:
        """float32 [N, G]."""
        names = ("scales", "weight_scale", "weight_scale_inv", "scale", "SCB", "weight.absmax")
        info = next(self.info.parts[name] for name in names if name in self.info.parts)
        values = (
            self._nested()
            if self.scheme.indexed
            else _scale_numbers(self._read(info).numpy(), info.dtype)
        )
        if self.scheme.layout == "rows":
            values = values / np.float32(127)
        bad = int(np.count_nonzero(~np.isfinite(values)))
        if bad:
            raise CheckpointError(f"{info.name}: {bad} of {values.size} scales are not finite")
        if self.scheme.layout in ("gptq", "awq"):
            return values.reshape(self.info.groups, -1).T
        if self.scheme.layout == "gemv":
            return values.reshape(self.rows, -1)[:, : self.info.groups]
        values = values.reshape(self.info.scale_rows, self.info.groups)
        return values[np.arange(self.rows) // (self.scheme.rows_per_scale or self.rows)]

    def _nested(self) -> _Floats:
        """float32 scale of each block."""
        parts = self.info.parts
        part = parts[f"weight.quant_state.bitsandbytes__{self.scheme.element}"]
        state, stored = read_state(part.name, self._read(part).numpy()), parts["weight.absmax"]
        raw = self._read(stored).numpy()
        if not state.nested_block:
            return _scale_numbers(raw, stored.dtype)
        scales, numbers = (
            _scale_numbers(self._read(parts[f"weight.nested_{name}"]).numpy(), "F32")
            for name in ("absmax", "quant_map")
        )
        return unnested(state, raw, scales, numbers)

    def _table(self) -> Tensor | None:
        """float32 [16]."""
        if not self.scheme.indexed:
            return None
        info = self.info.parts["weight.quant_map"]
        table = self._read(info).view(torch.float32)
        if not bool(torch.isfinite(table).all()):
            raise CheckpointError(f"{info.name} is not finite; the checkpoint is corrupt")
        return table

    def _factors(self) -> Tensor | None:
        """float32 [N], all the same. The reciprocal of a divisor is rounded once."""
        if not self.scheme.factor:
            return None
        info = self.info.parts[self.scheme.factor]
        value = self._read(info).view(torch.float32).view(())
        if not bool(torch.isfinite(value)) or (self.scheme.divides and not bool(value)):
            raise CheckpointError(f"{info.name} is {float(value)}; the checkpoint is corrupt")
        return (1 / value if self.scheme.divides else value).repeat(self.rows)

    def _zeros(self) -> _Bytes | None:
        """uint8 [N, G], or None if the weight is symmetric, which the tensor must not deny."""
        name = next((p for p in ("qzeros", "weight_zero_point") if p in self.info.parts), None)
        if name is None:
            return None
        stored = self._stored_zeros(name)
        if self.scheme.layout in ("gptq", "awq", "gemv"):
            mask = np.uint8((1 << self.scheme.bits) - 1)
            zeros = (stored + np.uint8(self.scheme.zero_bias)) & mask
        else:
            zeros = stored
        if not self.scheme.symmetric:
            return zeros
        # Symmetric checkpoints carry the middle as either version stores it, or nothing but zeros.
        allowed = {self.middle}
        if self.scheme.layout == "gptq":
            allowed |= {self.middle - 1, 0}
        if len(set(np.unique(stored).tolist())) > 1 or int(stored.flat[0]) not in allowed:
            raise CheckpointError(
                f"{self.info.parts[name].name} holds zero points other than the middle of the "
                f"codes, but the weight is declared symmetric ({self.scheme}); config and weights "
                "do not belong together"
            )
        return None

    def _stored_zeros(self, name: str) -> _Bytes:
        """uint8 [N, G] as stored, signed ones plus the middle."""
        rows, groups = self.rows, self.info.groups
        if self.scheme.layout == "gptq":
            return self._unpack(self._words(name)).T
        if self.scheme.layout == "awq":
            return self._unpack_awq(name)
        if self.scheme.layout == "gemv":
            return self._unpack(self._words(name))[:, :groups]
        if self.info.parts[name].dtype == "I32":
            return self._unpack(self._words(name).transpose(1, 0, 2)).T[:rows]
        signed = self._read(self.info.parts[name]).numpy().view(np.int8).reshape(-1, groups)
        zeros = signed.astype(np.int16) + self.middle
        if zeros.min() < 0 or zeros.max() >= 2 * self.middle:
            raise CheckpointError(
                f"{self.info.parts[name].name} holds zero points {signed.min()} to {signed.max()}, "
                f"which {self.scheme.bits} bits do not have; the checkpoint is corrupt"
            )
        return zeros.astype(np.uint8)


def _scale_numbers(raw: _Bytes, dtype: str) -> _Floats:
    """float32 of each stored scale."""
    if dtype in EXPONENT_SCALES:
        powers = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.nan)
        return powers.astype(np.float32)[raw]
    if dtype == "F8_E4M3":
        return _e4m3()[raw]
    if dtype == "BF16":  # the upper half of a float32
        return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.view(np.float16 if dtype == "F16" else np.float32).astype(np.float32)
