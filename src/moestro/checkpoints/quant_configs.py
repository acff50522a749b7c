"""Owns what config.json says about quantized weights: ``quantization_config`` and its methods.

A checkpoint whose weights are packed by a method that is not read is refused by name when it is
opened: its tensors would be misread, or only be found missing much later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moestro.checkpoints.files import show
from moestro.core.errors import UnsupportedFormat

#: Methods that are known by name and not read yet, with what they are.
KNOWN_METHODS: dict[str, str] = {
    "awq": "AWQ 4-bit integers",
    "bitsandbytes": "bitsandbytes nf4 or int8",
    "compressed-tensors": "compressed-tensors packed integers or floats",
    "fp8": "8-bit floats with block scales",
    "gptq": "GPTQ packed integers",
    "mxfp4": "4-bit floats with shared exponents",
}

_KEYS = ("quantization_config", "compression_config")
_WAY_OUT = "open the float checkpoint it was made from, or a GGUF file of the model"


def declarations(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(place, declaration) of each non-empty quantization declared in a config.json, also inside
    the sub-configs of multi-part models (``text_config`` and the like)."""
    for key in _KEYS:
        if config.get(key):
            yield key, config[key]
    for name, part in config.items():
        if isinstance(part, Mapping) and name not in _KEYS:
            for key in _KEYS:
                if part.get(key):
                    yield f"{name}.{key}", part[key]


def refuse_quantized(config: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedFormat if a config.json declares quantized weights.

    ``where`` is the file the config came from. The message names the method and its settings.
    """
    for place, declared in declarations(config):
        if not isinstance(declared, Mapping):
            raise UnsupportedFormat(
                f"{where}: {place} is {type(declared).__name__}, not an object, so how the weights "
                f"are stored is unknown; {_WAY_OUT}"
            )
        method = declared.get("quant_method")
        if isinstance(method, str) and method in KNOWN_METHODS:
            raise UnsupportedFormat(
                f"{where}: the weights are quantized with {method} ({KNOWN_METHODS[method]}; "
                f"{_settings(declared)}), which is not read yet; {_WAY_OUT}"
            )
        named = f"with {show(method)}" if method else "by a method it does not name"
        raise UnsupportedFormat(
            f"{where}: {place} says the weights are quantized {named}; known (and not read yet): "
            f"{', '.join(sorted(KNOWN_METHODS))}; {_WAY_OUT}"
        )


def _settings(declared: Mapping[str, Any]) -> str:
    keys = ("bits", "group_size", "sym", "desc_act", "format", "fmt", "weight_block_size")
    shown = [f"{key}={show(declared[key])}" for key in keys if key in declared]
    return ", ".join(shown)[:120] or "no settings given"
