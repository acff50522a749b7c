"""Owns the facts of a declared quantization: how the weight of each module is stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from moestro.checkpoints.declared import GROUPS

#: how a module's tensors are laid out, see ``quantized.py``
Layout = Literal[
    "gptq", "awq", "gemv", "packed", "plain", "inverse", "scaled", "pairs", "blocks",
    "rows", "nf4", "fp4",
]  # fmt: skip
#: what a code is: a whole number, a float of 8 or of 4 bits, or an index into a stored table
Element = Literal["int", "e4m3", "e2m1", "nf4", "fp4"]

#: types of scales that are numbers
FLOAT_SCALES = ("F16", "BF16", "F32")
#: types of scales under a factor
SMALL_SCALES = ("F8_E4M3",)
#: types of scales that are exponents of two with bias 127 (e8m0)
EXPONENT_SCALES = ("F8_E8M0", "U8")


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How one module's weight is stored.

    bits: of a code, 4 or 8. group_size: input channels that share a scale, 0 for the whole row.
    rows_per_scale: output channels that share it, 0 for all. symmetric: every zero point is
    2^(bits-1), or the codes are floats; else they are in a tensor. zero_bias: is added to stored
    zero points, modulo 2^bits (GPTQ stores them minus one). act_order: the declaration says that a
    tensor assigns input channels to groups. scale_types: of the tensor of scales. factor: the name
    of a tensor with one number that all scales are multiplied by, or divided by if ``divides``.
    """

    layout: Layout
    bits: int
    group_size: int
    symmetric: bool
    zero_bias: int = 0
    act_order: bool = False
    rows_per_scale: int = 1
    element: Element = "int"
    scale_types: tuple[str, ...] = FLOAT_SCALES
    factor: str = ""
    divides: bool = False

    @property
    def is_float(self) -> bool:
        return self.element != "int"

    @property
    def indexed(self) -> bool:
        """Codes are indices into a table of the checkpoint's own."""
        return self.element in ("nf4", "fp4")

    @property
    def kernel_group(self) -> int:
        """Input channels per scale in the weight format, 0 for the whole row.

        A wide group becomes several with equal scales, and so does a row with zero points, for want
        of a row format that has them.
        """
        if self.indexed:
            return self.group_size
        if self.element == "e2m1":
            return 16 if self.factor else GROUPS[-1]
        if not self.group_size and self.symmetric:
            return 0
        return next(group for group in GROUPS if self.group_size % group == 0)

    @property
    def format_name(self) -> str:
        """The weight format that holds such weights without loss; a type that none holds."""
        if self.indexed:
            return self.element.upper()
        if self.element == "e2m1":
            return "nvfp4s" if self.factor else "mxfp4"
        group = f"g{self.kernel_group}" if self.kernel_group else "row"
        if self.element == "e4m3":
            return f"fp8-{group}"
        return f"int{self.bits}{'' if self.symmetric else 'z'}-{group}"

    def __str__(self) -> str:
        group = f"groups of {self.group_size}" if self.group_size else "one scale per row"
        if self.rows_per_scale != 1:
            rows, cols = (str(n or "all") for n in (self.rows_per_scale, self.group_size))
            group = f"one scale per {rows} x {cols}"
        kind = "symmetric" if self.symmetric else "zero points"
        return f"{self.bits} bits, {group}, {self.element if self.is_float else kind}"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A scheme (None: floating point) for the modules whose name ``matches``.

    others: schemes that the tensors of such a module may have instead, told by names and types.
    """

    matches: Callable[[str], object]
    scheme: Scheme | None
    others: tuple[Scheme, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """A checkpoint's declared quantization. ``where`` begins messages. The first rule wins."""

    method: str
    where: str
    rules: tuple[Rule, ...]

    def schemes(self, module: str) -> tuple[Scheme, ...]:
        """How a module's weight may be stored; none if it is declared to be in floating point."""
        rule = next((rule for rule in self.rules if rule.matches(module)), None)
        if rule is None or rule.scheme is None:
            return ()
        return (rule.scheme, *rule.others)

    def scheme(self, module: str) -> Scheme | None:
        """The first of ``schemes``."""
        return next(iter(self.schemes(module)), None)

    def has(self, layout: Layout) -> bool:
        """Some modules may have that layout."""
        return any(rule.scheme and rule.scheme.layout == layout for rule in self.rules)
