"""What a plan needs to know of a model: bytes and operations of each part, from headers alone."""

from __future__ import annotations

from dataclasses import dataclass

from moestro.memory.placement import ExpertLayer


@dataclass(frozen=True, kw_only=True)
class Product:
    """Matrices of one format that a token is multiplied with. nbytes: read for it; operations: two
    per weight and token.
    """

    format_name: str
    nbytes: int
    operations: int
    is_float: bool


@dataclass(frozen=True, kw_only=True)
class Group:
    """Weights that every token passes and that live in one place, ``layers.3.attention``.

    nbytes: kept in memory. products: what is computed with them, of the embedding nothing.
    per_logit: only for tokens whose logits are wanted. layer: -1 outside of layers.
    """

    key: str
    layer: int
    nbytes: int
    products: tuple[Product, ...]
    per_logit: bool = False


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The routed experts of a layer. nbytes: of one blob; products: of one expert."""

    layer: int
    num_experts: int
    top_k: int
    nbytes: int
    products: tuple[Product, ...]

    @property
    def total(self) -> int:
        return self.num_experts * self.nbytes

    @property
    def placed(self) -> ExpertLayer:
        return ExpertLayer(layer=self.layer, num_experts=self.num_experts, nbytes=self.nbytes)


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Keys and values of one layer. nbytes: per position. window: positions that count, 0: all.
    operations: of one token with one position.
    """

    layer: int
    nbytes: int
    operations: int
    window: int = 0

    def seen(self, depth: float) -> float:
        """Positions that a token after ``depth`` others reads."""
        return min(depth, self.window) if self.window else depth


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """scratch_per_token: bytes of activation buffers for each token of a step. looked_up: formats
    of which rows are taken, as of the embedding. stored_nbytes: of the files. packed: written by
    ``moestro convert``, so that experts can be read one by one. format_name: of most bytes.
    """

    name: str
    hidden_size: int
    vocab_size: int
    context_length: int
    groups: tuple[Group, ...]
    experts: tuple[Experts, ...]
    caches: tuple[Cache, ...]
    scratch_per_token: int
    looked_up: frozenset[str] = frozenset()
    stored_nbytes: int = 0
    packed: bool = False
    format_name: str = ""

    @property
    def position_nbytes(self) -> int:
        """Bytes of keys and values of one position in all layers."""
        return sum(cache.nbytes for cache in self.caches)

    @property
    def dense_nbytes(self) -> int:
        """Bytes of all weights but routed experts."""
        return sum(group.nbytes for group in self.groups)

    @property
    def experts_nbytes(self) -> int:
        return sum(experts.total for experts in self.experts)

    @property
    def weights_nbytes(self) -> int:
        return self.dense_nbytes + self.experts_nbytes

    @property
    def format_names(self) -> set[str]:
        """Formats of all matrices."""
        products = [p for group in self.groups for p in group.products]
        products += [p for experts in self.experts for p in experts.products]
        return {product.format_name for product in products} | self.looked_up
