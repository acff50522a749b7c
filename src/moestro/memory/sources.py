"""Finds every weight of a model in a checkpoint and decides its format, from headers alone.

All that can be wrong with names, shapes, counts and types is found here, before a weight is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from moestro import formats
from moestro.checkpoints.base import Checkpoint, TensorInfo
from moestro.checkpoints.quantized import QuantizedInfo
from moestro.core.errors import CheckpointError, UnsupportedFormat
from moestro.formats.base import Format
from moestro.memory.expert_bank import PROJECTION_NAMES, BlobLayout
from moestro.memory.policy import FormatPolicy
from moestro.memory.weights import HeadRows, WeightSpec

#: checkpoint types that are plain floating point numbers, with their bytes
FLOAT_TYPES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}

_SHOWN = 8  # missing names listed in a message


@dataclass(frozen=True, kw_only=True)
class Source:
    """A vector or matrix that was found. ``format`` is None for vectors, which become float32.

    named: the policy names the format, so that something may be lost; else it holds all.
    head_rows: how ``info`` holds the matrix, if not alone. values: of a vector that the tensor only
    implies (``input_orders``).
    """

    spec: WeightSpec
    info: TensorInfo
    format: Format | None
    named: bool = False
    head_rows: HeadRows | None = None
    values: Tensor | None = field(default=None, repr=False)

    @property
    def rows(self) -> int:
        return 1 if self.format is None else self.spec.shape[0]

    @property
    def cols(self) -> int:
        return self.spec.shape[-1]

    @property
    def source_nbytes(self) -> int:
        return self.info.stored_nbytes

    @property
    def ordered(self) -> bool:
        """See ``Part.ordered``; rows that are taken apart have their columns as the input has."""
        return self.head_rows is None and _is_repacked(self.info, self.format)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One projection of all experts: E tensors, or one stacked tensor (then len(infos) is 1).

    ``fused``: (index, count) of this projection among those in each expert's rows.
    ``interleaved``: these take turns row by row, instead of lying side by side.
    ``named``: as in Source. ``transposed``: the tensor holds [cols, rows] of an expert.
    """

    infos: tuple[TensorInfo, ...]
    rows: int
    cols: int
    format: Format
    fused: tuple[int, int] = (0, 1)
    interleaved: bool = False
    named: bool = False
    transposed: bool = False

    @property
    def channels(self) -> slice:
        """The output channels of this projection among those of the tensor."""
        index, count = self.fused
        if self.interleaved:
            return slice(index, None, count)
        return slice(index * self.rows, (index + 1) * self.rows)

    @property
    def stacked(self) -> bool:
        return len(self.infos) == 1 and len(self.infos[0].shape) == 3

    def info(self, expert: int) -> TensorInfo:
        """The tensor that holds one expert's projection."""
        return self.infos[0] if self.stacked else self.infos[expert]

    def ordered(self, expert: int) -> bool:
        """The packed columns are in the order of the checkpoint's groups (``input_orders``)."""
        return _is_repacked(self.info(expert), self.format)

    @property
    def tensor_rows(self) -> int:
        """Output channels of one expert in the tensor: of all that are fused."""
        return self.fused[1] * self.rows


@dataclass(frozen=True, kw_only=True)
class ExpertsSource:
    """A layer's experts that were found."""

    spec: WeightSpec
    parts: tuple[Part, Part, Part]

    @property
    def num_experts(self) -> int:
        return self.spec.shape[0]

    @property
    def layout(self) -> BlobLayout:
        return BlobLayout.plan([(p.format.name, p.rows, p.cols) for p in self.parts])

    @property
    def source_nbytes(self) -> int:
        unique = {info.name: info.stored_nbytes for part in self.parts for info in part.infos}
        return sum(unique.values())


Resolved = Source | ExpertsSource


def resolve(
    checkpoint: Checkpoint, specs: Sequence[WeightSpec], policy: FormatPolicy
) -> list[Resolved]:
    """Match specs with tensors, in the order of the specs; absent optional ones are left out.

    Raises CheckpointError for missing tensors (listing the first), wrong shapes and wrong expert
    counts; UnsupportedFormat for types that cannot be kept and for which the policy names nothing.
    """
    finder = _Finder(checkpoint, policy)
    found = [finder.find(spec) for spec in specs]
    if finder.missing:
        listed = ", ".join(finder.missing[:_SHOWN])
        more = len(finder.missing) - _SHOWN
        raise CheckpointError(
            f"{checkpoint.path} lacks {len(finder.missing)} tensors that the model needs: {listed}"
            + (f" and {more} more" if more > 0 else "")
            + "; the checkpoint is incomplete or of another architecture"
        )
    return [item for item in found if item is not None]


class _Finder:
    def __init__(self, checkpoint: Checkpoint, policy: FormatPolicy) -> None:
        self.checkpoint = checkpoint
        self.policy = policy
        self.names = set(checkpoint.names())
        self.missing: list[str] = []

    def find(self, spec: WeightSpec) -> Resolved | None:
        if spec.kind == "experts":
            return self._experts(spec)
        picked = () if spec.head_rows is None else spec.head_rows.sources
        names = spec.sources + picked
        name = next((name for name in names if name in self.names), None)
        if name is None:
            if not spec.optional:
                self.missing.append(_any_of(names, spec.key))
            return None
        info = self.checkpoint.info(name)
        if spec.head_rows is not None:
            return self._of_heads(spec, spec.head_rows, info)
        self._require_shape(info, spec.shape)
        if spec.kind == "vector":
            self._require_readable(info)
            return Source(spec=spec, info=info, format=None)
        return Source(
            spec=spec,
            info=info,
            format=self._format(spec.key, spec.role, info),
            named=self._named(spec.key, spec.role, info),
        )

    def _of_heads(self, spec: WeightSpec, head_rows: HeadRows, info: TensorInfo) -> Source:
        """A matrix of every head's rows, stacked or among others."""
        named = self._named(spec.key, spec.role, info)
        if info.name not in head_rows.sources:
            rows, cols = spec.shape
            if info.shape != (head_rows.heads, rows // head_rows.heads, cols):
                self._require_shape(info, spec.shape)
            format_ = self._format(spec.key, spec.role, info)
            return Source(spec=spec, info=info, format=format_, named=named)
        self._require_shape(info, head_rows.stored_shape(spec.shape))
        if named or info.dtype in FLOAT_TYPES:
            format_ = self._format(spec.key, spec.role, info)
        else:
            # Scales belong to rows that are taken apart here, so the values are kept instead.
            self._require_readable(info)
            format_ = formats.exact_for("F32")
        return Source(spec=spec, info=info, format=format_, named=named, head_rows=head_rows)

    def _experts(self, spec: WeightSpec) -> ExpertsSource | None:
        if spec.expert_sources is None:
            raise ValueError(f"{spec.key}: a spec of kind experts needs expert_sources")
        if len(spec.shape) != 3:
            raise ValueError(f"{spec.key}: the shape of experts is (E, intermediate, hidden)")
        _, intermediate, hidden = spec.shape
        sources = spec.expert_sources

        def infos(names: tuple[str, ...], rows: int, cols: int) -> tuple[TensorInfo, ...]:
            return self._infos(spec, names, (rows, cols))

        fused = infos(sources.gate_up, 2 * intermediate, hidden)
        if fused:
            gate_up = [(fused, intermediate, hidden, (half, 2)) for half in (0, 1)]
        else:
            gate_up = [
                (infos(names, intermediate, hidden), intermediate, hidden, (0, 1))
                for names in (sources.gate, sources.up)
            ]
        down = (infos(sources.down, hidden, intermediate), hidden, intermediate, (0, 1))
        before = len(self.missing)
        if not fused:
            self._note_missing(spec, sources.gate + sources.gate_up, gate_up[0][0])
            if sources.up:
                self._note_missing(spec, sources.up, gate_up[1][0])
        self._note_missing(spec, sources.down, down[0])
        if len(self.missing) > before or not all(infos for infos, *_ in [*gate_up, down]):
            return None
        gate, up, last = (
            self._part(spec, name, *found)
            for name, found in zip(PROJECTION_NAMES, [*gate_up, down], strict=True)
        )
        return ExpertsSource(spec=spec, parts=(gate, up, last))

    def _infos(
        self, spec: WeightSpec, candidates: tuple[str, ...], shape: tuple[int, int]
    ) -> tuple[TensorInfo, ...]:
        """Infos of the first candidate that is there: E of them, or one stacked, or none.

        shape: (rows, cols) of one expert.
        """
        count = spec.shape[0]
        for name in candidates:
            if "{e}" not in name:
                if name in self.names:
                    info = self.checkpoint.info(name)
                    one = shape[::-1] if _transposed(spec, info) else shape
                    self._require_shape(info, (count, *one))
                    return (info,)
                continue
            present = [name.format(e=e) for e in range(count) if name.format(e=e) in self.names]
            if not present:
                continue
            if name.format(e=count) in self.names:
                raise CheckpointError(
                    f"{self.checkpoint.path}: the configuration says {count} experts, but "
                    f"{name.format(e=count)} is there too; config and weights do not belong "
                    "together"
                )
            if len(present) < count:
                wanted = (name.format(e=e) for e in range(count))
                self.missing += [n for n in wanted if n not in self.names]
                return ()
            infos = tuple(self.checkpoint.info(n) for n in present)
            for info in infos:
                self._require_shape(info, shape)
            return infos
        return ()

    def _note_missing(
        self, spec: WeightSpec, candidates: tuple[str, ...], infos: tuple[TensorInfo, ...]
    ) -> None:
        """Record a projection of which no tensor at all is there."""
        if infos or spec.optional:
            return
        first = tuple(name.format(e=0) for name in candidates)
        if not any(name.format(e=e) in self.names for name in candidates for e in _ids(spec)):
            self.missing.append(_any_of(first, spec.key))

    def _part(
        self,
        spec: WeightSpec,
        projection: str,
        infos: tuple[TensorInfo, ...],
        rows: int,
        cols: int,
        fused: tuple[int, int],
    ) -> Part:
        key = f"{spec.key}.{projection}"
        transposed = _transposed(spec, infos[0])
        if transposed and infos[0].dtype not in FLOAT_TYPES:
            raise UnsupportedFormat(
                f"{self.checkpoint.path}: {infos[0].name} holds transposed experts of type "
                f"{infos[0].dtype}; transposed ones are read from {', '.join(FLOAT_TYPES)}"
            )
        wanted = {self._format(key, spec.role, info).name for info in infos}
        if len(wanted) > 1:
            types = ", ".join(sorted({info.dtype for info in infos}))
            raise UnsupportedFormat(
                f"{key}: the experts of one layer have different types ({types}), but share one "
                f"format; name it on purpose, for example --format experts=NAME"
            )
        format_ = self._format(key, spec.role, infos[0])
        return Part(
            infos=infos,
            rows=rows,
            cols=cols,
            format=format_,
            fused=fused,
            interleaved=_interleaved(spec),
            named=self._named(key, spec.role, infos[0]),
            transposed=transposed,
        )

    def _named(self, key: str, role: str, info: TensorInfo) -> bool:
        return self.policy.name_for(key, role, info.dtype) is not None

    def _format(self, key: str, role: str, info: TensorInfo) -> Format:
        self._require_whole(info)
        # Codes give their values whatever they are packed in.
        if not isinstance(info, QuantizedInfo):
            self._require_readable(info)
        elif info.dtype not in formats.names() and not self._named(key, role, info):
            raise UnsupportedFormat(
                f"{self.checkpoint.path}: {info.name}: no format holds {info.dtype} weights "
                "without loss; name one (the router its own beside an integer format): "
                "moestro convert MODEL OUT --format NAME,router=NAME"
            )
        try:
            return self.policy.format_for(key, role, info.dtype)
        except UnsupportedFormat as error:
            raise UnsupportedFormat(f"{self.checkpoint.path}: {info.name}: {error}") from error

    def _require_readable(self, info: TensorInfo) -> None:
        if info.dtype in FLOAT_TYPES:
            return
        try:
            formats.exact_for(info.dtype)
        except UnsupportedFormat as error:
            raise UnsupportedFormat(f"{self.checkpoint.path}: {info.name}: {error}") from error

    def _require_whole(self, info: TensorInfo) -> None:
        """Some GGUF files (NVFP4, BitNet) keep a factor of a matrix in a tensor beside it."""
        factor = info.name.removesuffix(".weight") + ".scale"
        if self.checkpoint.container == "gguf" and factor in self.names:
            raise UnsupportedFormat(
                f"{self.checkpoint.path}: {info.name} is to be multiplied by {factor}, which is "
                "not supported; use a file of the model without such scales, for example in Q4_K_M"
            )

    def _require_shape(self, info: TensorInfo, shape: tuple[int, ...]) -> None:
        if info.shape == shape or (len(shape) == 3 and shape[0] == 1 and info.shape == shape[1:]):
            return
        # Axes of length one are kept by some converters and dropped by others.
        loose = not isinstance(info, QuantizedInfo)
        if loose and [n for n in info.shape if n != 1] == [n for n in shape if n != 1]:
            return
        counts = ""
        if len(shape) == 3 and len(info.shape) == 3 and info.shape[0] != shape[0]:
            counts = f" (the configuration says {shape[0]} experts, the tensor holds "
            counts += f"{info.shape[0]})"
        raise CheckpointError(
            f"{self.checkpoint.path}: {info.name} should be {list(shape)} but is "
            f"{list(info.shape)}{counts}; config and weights do not belong together"
        )


def _is_repacked(info: TensorInfo, format_: Format | None) -> bool:
    """Codes that are packed in the format they are codes of."""
    return isinstance(info, QuantizedInfo) and format_ is not None and info.dtype == format_.name


def _ids(spec: WeightSpec) -> range:
    return range(spec.shape[0])


def _interleaved(spec: WeightSpec) -> bool:
    sources = spec.expert_sources
    return sources is not None and sources.layout == "interleaved_transposed"


def _transposed(spec: WeightSpec, info: TensorInfo) -> bool:
    """Quantized tensors are not: the channels that share a scale lie in a row."""
    return _interleaved(spec) and not isinstance(info, QuantizedInfo)


def _any_of(names: Sequence[str], key: str) -> str:
    """How a missing weight is called: by its first source name, and how many others were tried."""
    if not names:
        return key
    others = f" (or {' or '.join(names[1:])})" if len(names) > 1 else ""
    return f"{names[0]}{others}"
