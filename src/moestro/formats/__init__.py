"""Weight formats that kernels run, by name: one file per family, all in tiles of 16 channels."""

from __future__ import annotations

from moestro.core.errors import UnsupportedFormat
from moestro.core.registry import Registry
from moestro.formats import float as float_formats
from moestro.formats import (
    fp8,
    int4,
    int5,
    int8,
    kquant_affine,
    kquant_symmetric,
    lattice,
    lut4,
    nvfp4,
    nvfp4s,
    ternary,
)
from moestro.formats.base import Format

#: what ``convert`` quantizes to when no format is named
DEFAULT = "int4-g32"
#: for what every token reads beside the experts, where eight bits cost little
DEFAULT_SHARED = "int8-g32"

_FORMATS: Registry[Format] = Registry("format", UnsupportedFormat)
_EXACT: dict[str, Format] = {}

_FAMILIES = (
    float_formats, fp8, int8, int5, int4, lut4, nvfp4, nvfp4s, kquant_affine, kquant_symmetric,
    lattice, ternary,
)  # fmt: skip
for _family in _FAMILIES:
    for _format in _family.FORMATS:
        _FORMATS.add(_format.name, _format)
        for _source in _format.exact_from:
            _EXACT[_source] = _format


def get(name: str) -> Format:
    """The format of that name. Raises UnsupportedFormat listing the known ones."""
    return _FORMATS.get(name)


def names() -> list[str]:
    """All format names, sorted."""
    return _FORMATS.names()


def exact_for(source_type: str) -> Format:
    """The format that holds a checkpoint tensor type without loss. Raises UnsupportedFormat.

    Weights that a checkpoint stores as codes, scales and zero points have as their type the name of
    the format that holds these (``Format.pack_codes``).
    """
    if source_type in _FORMATS:
        return _FORMATS.get(source_type)
    try:
        return _EXACT[source_type]
    except KeyError:
        known = ", ".join(sorted(_EXACT))
        raise UnsupportedFormat(
            f"weight type {source_type} is not supported; types that are: {known}. Use a "
            f"checkpoint in one of those, for example one quantized to Q4_K_M, Q8_0 or kept in BF16"
        ) from None
