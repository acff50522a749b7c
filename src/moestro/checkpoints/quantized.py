"""Finds the weights that a quantized safetensors checkpoint stores in several tensors each.

``X.qweight``, ``X.scales``, ... become one QuantizedInfo under the name ``X.weight``, which is what
models ask for; stacked experts, ``X_blocks`` and ``X_scales``, become ``X``. All that headers tell
is checked here against what config.json declares: a tensor that is missing, of another type, or of
a shape that contradicts bits, group size or the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from moestro.checkpoints.base import TensorInfo
from moestro.checkpoints.declared import WAY_OUT
from moestro.checkpoints.files import show
from moestro.checkpoints.quant_bitsandbytes import read_state
from moestro.checkpoints.quant_schemes import FLOAT_SCALES, Layout, Quantization, Scheme
from moestro.core.errors import CheckpointError, UnsupportedFormat

WORD_BITS = 32
#: codes in one of the blocks of stacked experts
BLOCK = 32
_FLOATS = (*FLOAT_SCALES, "F64")

_INDEXED = ("weight", "weight.absmax", "weight.quant_map")
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
#: tensors of a module by layout: that of the codes first, then what is required, then what may be
_PARTS: dict[Layout, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gptq": (("qweight", "scales"), ("qzeros", "g_idx")),
    "awq": (("qweight", "scales", "qzeros"), ()),
    "gemv": (("qweight", "scales", "qzeros"), ()),
    "packed": (
        ("weight_packed", "weight_scale", "weight_shape"),
        ("weight_zero_point", "weight_g_idx"),
    ),
    "plain": (("weight", "weight_scale"), ("weight_zero_point", "weight_g_idx")),
    "inverse": (("weight", "weight_scale_inv"), ()),
    "scaled": (("weight", "scale"), ()),
    "pairs": (("weight_packed", "weight_scale"), ()),
    "blocks": (("blocks", "scales"), ()),
    "rows": (("weight", "SCB"), ("weight_format",)),
    "nf4": ((*_INDEXED, "weight.quant_state.bitsandbytes__nf4"), _NESTED),
    "fp4": ((*_INDEXED, "weight.quant_state.bitsandbytes__fp4"), _NESTED),
}
#: names that only modules with packed codes have
_PACKED = {"qweight", "weight_packed", "blocks"}
#: names that mean a module has codes
_COMPANIONS = {"qzeros", "scales", "weight_scale", "weight_zero_point", "weight_shape"}
_COMPANIONS |= {"weight_scale_inv"}
#: types of codes that lie in a tensor named as that of a float checkpoint
_CODE_TYPES = ("I8", "U8", "I32", "F8_E4M3")

Read = Callable[[TensorInfo], Tensor]


@dataclass(frozen=True, kw_only=True)
class QuantizedInfo(TensorInfo):
    """A weight [N, K], or [E, N, K] of stacked experts, that is stored as codes, scales and more.

    dtype: the name of the weight format that holds it without loss. file, offset and nbytes: of
    the codes. parts: the stored tensors by the last part of their name.
    """

    scheme: Scheme
    parts: Mapping[str, TensorInfo] = field(repr=False)

    @property
    def stored_nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def groups(self) -> int:
        """Scales per output channel."""
        size = self.scheme.group_size
        return -(-self.shape[-1] // size) if size else 1

    @property
    def scale_rows(self) -> int:
        """Scales per group of input channels."""
        rows = self.scheme.rows_per_scale
        return -(-self.shape[-2] // rows) if rows else 1


def find_weights(
    quantization: Quantization, infos: Mapping[str, TensorInfo], read: Read
) -> dict[str, QuantizedInfo]:
    """All weights that are stored as codes, by the name of the weight.

    ``read`` gives a stored tensor's bytes; only shapes (16 bytes each) are read. Raises
    CheckpointError for tensors that are missing or contradict the declaration, UnsupportedFormat
    for what no format holds.
    """
    found: dict[str, QuantizedInfo] = {}
    blocks = quantization.has("blocks")
    for name, info in infos.items():
        module, part = _split(name, blocks)
        if part in _COMPANIONS:
            _require_codes(quantization, module, part, infos)
        if part not in _PACKED and not (part == "weight" and info.dtype in _CODE_TYPES):
            continue
        scheme = _scheme(quantization, module, part, infos)
        weight = _Module(module, scheme, infos, read).weight()
        if part in _PACKED and weight.name in infos:
            raise CheckpointError(
                f"{quantization.where}: {name} and {weight.name} are both there; which of them "
                "the model was made with is unknown, fetch the checkpoint again"
            )
        found[weight.name] = weight
    return found


def refuse_undeclared(infos: Mapping[str, TensorInfo], where: str) -> None:
    """Raise UnsupportedFormat for tensors of packed codes that no configuration explains."""
    for name, info in infos.items():
        if _split(name, info.dtype == "U8")[1] in _PACKED:
            raise UnsupportedFormat(
                f"{where}: {name} holds packed codes, but no config.json beside it has a "
                "quantization_config that says how; fetch the config.json of these weights"
            )


def gemv_zeros_width(groups: int, group_size: int) -> int:
    """Words of zero points per output channel (AutoAWQ, ``calculate_zeros_width``): those that the
    groups fill, up to a multiple of 4 or 2 for groups of 32 or 64."""
    multiple = max(1, 128 // group_size)
    return -(-groups // (8 * multiple)) * multiple


def _split(name: str, blocks: bool) -> tuple[str, str]:
    """(module, part) of a tensor's name; ``blocks``: experts may be stacked in blocks."""
    if blocks:
        for part in _PARTS["blocks"][0]:
            if name.endswith(f"_{part}"):
                return name.removesuffix(f"_{part}"), part
    module, _, part = name.rpartition(".")
    return module, part


def _tensor(layout: Layout, module: str, part: str) -> str:
    return f"{module}_{part}" if layout == "blocks" else f"{module}.{part}"


def _require_codes(
    quantization: Quantization, module: str, part: str, infos: Mapping[str, TensorInfo]
) -> None:
    plain = infos.get(f"{module}.weight")
    if any(f"{module}.{codes}" in infos for codes in _PACKED) or f"{module}_blocks" in infos:
        return
    if plain is None or plain.dtype in _FLOATS:
        beside = f"{module}.weight is {plain.dtype}" if plain else "there are none"
        raise CheckpointError(
            f"{quantization.where}: {module}.{part} belongs to integer codes, but {beside}; the "
            "checkpoint is incomplete"
        )


def _scheme(
    quantization: Quantization, module: str, part: str, infos: Mapping[str, TensorInfo]
) -> Scheme:
    """Of the schemes a module may have the one that its tensors fit; if none, the first."""
    schemes = quantization.schemes(module)
    if not schemes:
        name = f"{module}.{part}"
        raise CheckpointError(
            f"{quantization.where}: {name} holds codes, but {module} is declared to be in "
            "floating point; config and weights do not belong together"
        )
    scheme = next((s for s in schemes if _fits(s, module, infos)), schemes[0])
    codes = _PARTS[scheme.layout][0][0]
    if codes != part:
        raise CheckpointError(
            f"{quantization.where}: {quantization.method} ({scheme}) stores {module}.{codes}, but "
            f"{module}.{part} is there; config and weights do not belong together"
        )
    return scheme


def _fits(scheme: Scheme, module: str, infos: Mapping[str, TensorInfo]) -> bool:
    names = [_tensor(scheme.layout, module, part) for part in _PARTS[scheme.layout][0]]
    return all(n in infos for n in names) and infos[names[0]].dtype in _code_types(scheme)


def _code_types(scheme: Scheme) -> tuple[str, ...]:
    """Types of the tensor of codes."""
    if scheme.element == "e2m1":  # two to a byte
        return ("U8",) if scheme.layout in ("pairs", "blocks") else ("I8", "U8")
    if scheme.indexed:
        return ("U8",)
    if scheme.layout in ("gptq", "awq", "gemv", "packed"):
        return ("I32",)
    return ("F8_E4M3",) if scheme.is_float else ("I8",)


class _Module:
    """The tensors of one module, held against its scheme."""

    def __init__(
        self, name: str, scheme: Scheme, infos: Mapping[str, TensorInfo], read: Read
    ) -> None:
        self.name, self.scheme, self._read = name, scheme, read
        required, optional = _PARTS[scheme.layout]
        if not scheme.symmetric:
            required += tuple(p for p in optional if p in ("qzeros", "weight_zero_point"))
        if scheme.act_order:
            required += tuple(p for p in optional if p.endswith("g_idx"))
        if scheme.factor:
            required += (scheme.factor,)
        full = {p: _tensor(scheme.layout, name, p) for p in (*required, *optional)}
        for part in required:
            if full[part] not in infos:
                raise CheckpointError(
                    f"{full[part]} is missing, which weights of {scheme} need beside "
                    f"{full[required[0]]}; the checkpoint is incomplete"
                )
        self.parts = {p: infos[tensor] for p, tensor in full.items() if tensor in infos}
        self.codes = self.parts[required[0]]

    def weight(self) -> QuantizedInfo:
        stacked = self.scheme.layout == "blocks"
        if len(self.codes.shape) != (4 if stacked else 2):
            raise self._fail(self.codes, "stacked blocks" if stacked else "a matrix")
        shape = self._shape()
        layout = self.parts.get("weight_format")
        if layout is not None and self._read(layout).any():
            raise UnsupportedFormat(
                f"{layout.name}: bytes in the order of a GPU's tiles are not read; {WAY_OUT}"
            )
        weight = QuantizedInfo(
            name=self.name if stacked else f"{self.name}.weight",
            shape=shape,
            dtype=self.scheme.format_name,
            file=self.codes.file,
            offset=self.codes.offset,
            nbytes=self.codes.nbytes,
            scheme=self.scheme,
            parts=self.parts,
        )
        for part, types, shapes in self._expected(weight):
            info = self.parts.get(part)
            if info is not None and not (info.dtype in types and info.shape in shapes):
                wanted = " or ".join(str(list(s)) for s in dict.fromkeys(shapes))
                raise self._fail(info, f"{' or '.join(types)} {wanted}")
        return weight

    def _fail(self, info: TensorInfo, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"{info.name} is {info.dtype} {list(info.shape)}, but with {self.scheme} and "
            f"{self.codes.name} {list(self.codes.shape)} it should be {wanted}; config and weights "
            "do not belong together"
        )

    @property
    def _per_word(self) -> int:
        return WORD_BITS // self.scheme.bits

    def _shape(self) -> tuple[int, ...]:
        """[N, K] of the weight, or [E, N, K], as the codes' shape and, where there is one, the
        stored shape have it."""
        if self.scheme.layout == "blocks":
            experts, rows, blocks, _ = self.codes.shape
            return experts, rows, blocks * BLOCK
        first, second = self.codes.shape
        if self.scheme.layout == "gptq":
            return second, first * self._per_word
        if self.scheme.layout == "awq":
            return second * self._per_word, first
        if self.scheme.layout == "gemv":
            return first, second * self._per_word
        if self.scheme.indexed:
            return self._indexed_shape()
        if self.scheme.element == "e2m1":
            return first, 2 * second
        if self.scheme.layout != "packed":
            return first, second
        info = self.parts["weight_shape"]
        if info.dtype not in ("I64", "I32") or info.shape != (2,):
            raise self._fail(info, "I64 [2]")
        values = self._read(info).numpy().view(f"i{info.nbytes // 2}")
        rows, cols = int(values[0]), int(values[1])
        if rows != first or cols < 1 or -(-cols // self._per_word) != second:
            raise CheckpointError(
                f"{info.name} says [{rows}, {cols}], but {self.codes.name} is {[first, second]} "
                f"words of {self._per_word} codes; the checkpoint is corrupt"
            )
        return rows, cols

    def _indexed_shape(self) -> tuple[int, int]:
        part = self.parts[f"weight.quant_state.bitsandbytes__{self.scheme.element}"]
        self._state = state = read_state(part.name, self._read(part).numpy())
        rows, cols = state.shape
        for nested in _NESTED:
            if state.nested_block and nested not in self.parts:
                raise CheckpointError(
                    f"{self.name}.{nested} is missing, which {part.name} calls for; the checkpoint "
                    "is incomplete"
                )
        if -(-rows * cols // 2) != self.codes.nbytes:
            raise CheckpointError(
                f"{part.name} says {list(state.shape)}, but {self.codes.name} has "
                f"{self.codes.nbytes} bytes of two codes each; the checkpoint is corrupt"
            )
        if cols % state.block:
            raise UnsupportedFormat(
                f"{self.codes.name}: rows of {cols} weights are no whole blocks of {state.block}, "
                f"which is not read; {WAY_OUT}"
            )
        self.scheme = replace(self.scheme, group_size=state.block)
        return rows, cols

    def _expected_indexed(
        self,
    ) -> Iterator[tuple[str, tuple[str, ...], tuple[tuple[int, ...], ...]]]:
        blocks, nested = self._state.blocks, self._state.nested_block
        yield "weight", ("U8",), (self.codes.shape,)
        yield "weight.quant_map", ("F32",), ((16,),)
        yield "weight.absmax", ("U8" if nested else "F32",), ((blocks,),)
        if nested:
            yield "weight.nested_absmax", ("F32",), ((-(-blocks // nested),),)
            yield "weight.nested_quant_map", ("F32",), ((256,),)

    def _expected(
        self, weight: QuantizedInfo
    ) -> Iterator[tuple[str, tuple[str, ...], tuple[tuple[int, ...], ...]]]:
        """(part, types, shapes) that are right."""
        scheme, layout = self.scheme, self.scheme.layout
        (rows, cols), groups = weight.shape[-2:], weight.groups
        word = self._per_word
        codes = _PARTS[layout][0][0]
        if scheme.indexed:
            yield from self._expected_indexed()
            return
        if layout == "blocks":
            per_row = (*weight.shape[:-1], groups)
            yield codes, _code_types(scheme), ((*per_row, BLOCK // 2),)
            yield "scales", scheme.scale_types, (per_row,)
            return
        yield codes, _code_types(scheme), (self.codes.shape,)
        if layout == "gemv":
            width = gemv_zeros_width(groups, scheme.group_size)
            yield "scales", scheme.scale_types, ((rows, width * word),)
            yield "qzeros", ("I32",), ((rows, width),)
            return
        if layout in ("gptq", "awq"):
            if rows % word:
                raise UnsupportedFormat(
                    f"{self.codes.name} has {rows} output channels, which do not fill whole words "
                    f"of zero points; {show(layout)} has no rule for that"
                )
            yield "scales", scheme.scale_types, ((groups, rows),)
            yield "qzeros", ("I32",), ((groups, rows // word),)
            yield "g_idx", ("I32",), ((cols,),)
            return
        shapes: tuple[tuple[int, ...], ...] = ((weight.scale_rows, groups),)
        if groups == 1:
            shapes += ((weight.scale_rows,),)
        if groups == weight.scale_rows == 1:
            shapes += ((),)
        for part in ("weight_scale", "weight_scale_inv", "scale", "SCB"):
            yield part, scheme.scale_types, shapes
        yield scheme.factor, ("F32",), ((1,), ())
        zero = self.parts.get("weight_zero_point")
        if layout == "packed" and zero is not None and zero.dtype == "I32":
            yield "weight_zero_point", ("I32",), ((-(-rows // word), groups),)
        else:
            yield "weight_zero_point", ("I8",), shapes
        yield "weight_g_idx", ("I32",), ((cols,),)
