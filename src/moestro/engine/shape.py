"""The shape of a checkpoint's model as the plan takes it, resolved from headers alone."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import torch

from moestro import formats
from moestro.checkpoints import Checkpoint
from moestro.checkpoints.packed import PackedCheckpoint
from moestro.memory.model_shape import Cache, Experts, Group, ModelShape, Product
from moestro.memory.policy import FormatPolicy
from moestro.memory.sources import ExpertsSource, resolve
from moestro.memory.weights import WeightSpec
from moestro.models.spec import ModelDescription
from moestro.nn.kv_cache import LatentShape


def model_shape(
    checkpoint: Checkpoint,
    description: ModelDescription,
    policy: FormatPolicy,
    *,
    kv_dtype: str,
) -> ModelShape:
    """Raises CheckpointError and UnsupportedFormat as loading the model would."""
    parts = _packed(checkpoint, description) if isinstance(checkpoint, PackedCheckpoint) else None
    found = _Found(parts or _resolved(checkpoint, description, policy), description)
    return ModelShape(
        name=checkpoint.path.name or str(checkpoint.path),
        hidden_size=description.spec.hidden_size,
        vocab_size=description.spec.vocab_size,
        context_length=description.spec.context_length,
        groups=tuple(found.groups()),
        experts=tuple(found.experts()),
        caches=_caches(description, getattr(torch, kv_dtype)),
        scratch_per_token=_scratch_per_token(description),
        looked_up=found.looked_up(),
        stored_nbytes=found.stored,
        packed=parts is not None,
        format_name=found.main_format(),
    )


class _Part:
    """One weight: its bytes in memory and in files, and the matrices in it (of one expert)."""

    def __init__(
        self, spec: WeightSpec, nbytes: int, stored: int, matrices: list[tuple[str, int, int]]
    ) -> None:
        self.spec, self.nbytes, self.stored = spec, nbytes, stored
        self.products = tuple(_product(name, rows, cols) for name, rows, cols in matrices)


def _product(name: str, rows: int, cols: int) -> Product:
    fmt = formats.get(name)
    return Product(
        format_name=name,
        nbytes=fmt.nbytes(rows, cols),
        operations=2 * rows * cols,
        is_float=fmt.is_float,
    )


def _resolved(
    checkpoint: Checkpoint, description: ModelDescription, policy: FormatPolicy
) -> list[_Part]:
    parts = []
    for source in resolve(checkpoint, description.weights, policy):
        if isinstance(source, ExpertsSource):
            matrices = [(p.format.name, p.rows, p.cols) for p in source.parts]
            nbytes = source.layout.nbytes * source.num_experts
        elif source.format is None:
            matrices, nbytes = [], 4 * math.prod(source.spec.shape)
        else:
            matrices = [(source.format.name, source.rows, source.cols)]
            nbytes = source.format.nbytes(source.rows, source.cols)
        parts.append(_Part(source.spec, nbytes, source.source_nbytes, matrices))
    return parts


def _packed(checkpoint: PackedCheckpoint, description: ModelDescription) -> list[_Part]:
    present = set(checkpoint.names())
    parts = []
    for spec in description.weights:
        if spec.key not in present:
            continue
        entry, nbytes = checkpoint.entry(spec.key), checkpoint.info(spec.key).nbytes
        if spec.kind == "experts":
            matrices = [(p.format_name, p.rows, p.cols) for p in entry.parts]
        elif entry.kind == "matrix":
            matrices = [(entry.format_name, spec.shape[0], spec.shape[1])]
        else:
            matrices = []
        parts.append(_Part(spec, nbytes, nbytes, matrices))
    return parts


class _Found:
    """Parts gathered into what lives and is computed together."""

    def __init__(self, parts: list[_Part], description: ModelDescription) -> None:
        self._parts, self._top_k = parts, getattr(description.config, "top_k", 1)
        self.stored = sum(part.stored for part in parts)

    def groups(self) -> list[Group]:
        gathered: dict[str, list[_Part]] = defaultdict(list)
        for part in self._parts:
            if not is_routed(part.spec):
                gathered[_group_key(part.spec)].append(part)
        head = any(part.spec.role == "lm_head" for part in self._parts)
        groups = []
        for key, parts in gathered.items():
            role = parts[0].spec.role
            products = tuple(p for part in parts for p in part.products)
            if role == "embedding" and head:
                products = ()  # a row of it is looked up
            groups.append(
                Group(
                    key=key,
                    layer=parts[0].spec.layer,
                    nbytes=sum(part.nbytes for part in parts),
                    products=products,
                    per_logit=role in ("embedding", "lm_head"),
                )
            )
        return groups

    def experts(self) -> list[Experts]:
        return [
            Experts(
                layer=part.spec.layer,
                num_experts=part.spec.shape[0],
                top_k=self._top_k,
                nbytes=part.nbytes // part.spec.shape[0],
                products=part.products,
            )
            for part in self._parts
            if is_routed(part.spec)
        ]

    def looked_up(self) -> frozenset[str]:
        return frozenset(
            product.format_name
            for part in self._parts
            if part.spec.role == "embedding"
            for product in part.products
        )

    def main_format(self) -> str:
        """The format that holds most bytes."""
        sizes: Counter[str] = Counter()
        for part in self._parts:
            if part.products:
                sizes[part.products[0].format_name] += part.nbytes
        return sizes.most_common(1)[0][0] if sizes else ""


def is_routed(spec: WeightSpec) -> bool:
    return spec.kind == "experts" and spec.role == "experts"


#: role -> what a layer's weights of it are called together; norms go with attention, and what
#: belongs to routed experts but is needed wherever they are with the router
_NAMES = {
    "attention": "attention",
    "norm": "attention",
    "router": "router",
    "experts": "router",
    "dense": "mlp",
    "shared": "shared_expert",
}


def _group_key(spec: WeightSpec) -> str:
    if spec.layer < 0:
        return "norms" if spec.kind == "vector" else spec.key
    return f"layers.{spec.layer}.{_NAMES[spec.role]}"


def _caches(description: ModelDescription, dtype: torch.dtype) -> tuple[Cache, ...]:
    config, caches = description.config, []
    windows = getattr(config, "windows", ()) or (0,) * len(description.spec.caches)
    for layer, shape in enumerate(description.spec.caches):
        if isinstance(shape, LatentShape):  # scores over the whole row, values over its rank
            width = 2 * shape.rank + shape.rope_dim
        else:
            width = 2 * shape.head_dim
        caches.append(
            Cache(
                layer=layer,
                nbytes=shape.position_nbytes(dtype),
                operations=2 * config.num_heads * width,
                window=windows[layer],
            )
        )
    return tuple(caches)


def _scratch_per_token(description: ModelDescription) -> int:
    """Bytes of activation buffers per token of a step, from above: the residual stream and its
    normed copy, and one float32 output of each matrix of the widest layer, as no buffer is shared
    between unlike outputs.
    """
    widths: Counter[int] = Counter()
    for spec in description.weights:
        if spec.kind == "matrix" and spec.layer >= 0:
            widths[spec.layer] += spec.shape[0]
        elif spec.kind == "experts":
            widths[spec.layer] += 2 * spec.shape[0] + spec.shape[2]
    return 4 * (2 * description.spec.hidden_size + max(widths.values(), default=0))
