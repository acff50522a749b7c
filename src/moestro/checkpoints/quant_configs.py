"""Owns what config.json says about quantized weights: ``quantization_config`` and its methods.

Each declaration becomes frozen facts: for every module of the model a Scheme, or None where it is
kept in floating point. A method or a setting that is not read is refused by name when a checkpoint
is opened: its tensors would be misread, or only be found missing much later. Whether the tensors
are what is declared here is checked in ``quantized.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from moestro.checkpoints.declared import WAY_OUT, Declared
from moestro.checkpoints.files import show
from moestro.checkpoints.quant_schemes import (
    EXPONENT_SCALES,
    FLOAT_SCALES,
    SMALL_SCALES,
    Element,
    Layout,
    Quantization,
    Rule,
    Scheme,
)
from moestro.core.errors import CheckpointError, UnsupportedFormat

#: methods that are read
READ_METHODS: dict[str, str] = {
    "awq": "AWQ 4-bit integers",
    "bitsandbytes": "bitsandbytes nf4, fp4 and int8 (no format holds them: name one)",
    "compressed-tensors": "compressed-tensors integers, and floats of 8 or 4 bits",
    "fp8": "8-bit floats with scales per block or tensor, experts in 4-bit floats",
    "gptq": "GPTQ packed integers",
    "modelopt": "NVIDIA ModelOpt floats of 8 or 4 bits",
    "mxfp4": "4-bit floats with shared exponents",
}
#: methods that are known by name and not read yet, with what they are
KNOWN_METHODS: dict[str, str] = {
    "aqlm": "additive codebooks",
    "eetq": "EETQ 8-bit integers",
    "hqq": "half-quadratic quantization",
    "quark": "AMD Quark",
    "torchao": "torchao tensors",
}

_KEYS = ("quantization_config", "compression_config")
#: what some models declare beside it instead
_BESIDE = ("expert_dtype",)


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


def read_quantization(config: Mapping[str, Any], where: str) -> Quantization | None:
    """The quantization that a config.json declares, or None.

    ``where`` is the file the config came from. Raises UnsupportedFormat for a method or a setting
    that is not read, and CheckpointError for a malformed declaration.
    """
    found = list(declarations(config))
    if not found:
        return None
    if any(declared != found[0][1] for _, declared in found):
        places = " and ".join(place for place, _ in found)
        raise CheckpointError(f"{where}: {places} contradict each other; fetch config.json again")
    place, declared = found[0]
    if not isinstance(declared, Mapping):
        raise UnsupportedFormat(
            f"{where}: {place} is {type(declared).__name__}, not an object, so how the weights "
            f"are stored is unknown; {WAY_OUT}"
        )
    method = declared.get("quant_method")
    if isinstance(method, str) and method in _PARSERS:
        around = config.get(place.rpartition(".")[0]) or config
        beside = {key: around[key] for key in _BESIDE if around.get(key) is not None}
        reader = Declared({**beside, **declared}, f"{where}: {place}")
        return Quantization(method=method, where=where, rules=tuple(_PARSERS[method](reader)))
    if isinstance(method, str) and method in KNOWN_METHODS:
        raise UnsupportedFormat(
            f"{where}: the weights are quantized with {method} ({KNOWN_METHODS[method]}; "
            f"{_settings(declared)}), which is not read yet; {WAY_OUT}"
        )
    named = f"with {show(method)}" if method else "by a method it does not name"
    raise UnsupportedFormat(
        f"{where}: {place} says the weights are quantized {named}; methods that are read: "
        f"{', '.join(sorted(READ_METHODS))}; {WAY_OUT}"
    )


def _settings(declared: Mapping[str, Any]) -> str:
    keys = ("bits", "group_size", "sym", "desc_act", "format", "fmt", "weight_block_size")
    shown = [f"{key}={show(declared[key])}" for key in keys if key in declared]
    return ", ".join(shown)[:120] or "no settings given"


def _checked(declared: Declared, scheme: Scheme) -> Scheme:
    """Raises UnsupportedFormat if no format holds such weights."""
    if scheme.bits not in (4, 8):
        raise declared.refuse(f"integers of {scheme.bits} bits")
    if not scheme.symmetric and (scheme.is_float or scheme.rows_per_scale != 1):
        raise declared.refuse(f"zero points beside {scheme}")
    return scheme


def _anything(module: str) -> bool:
    return True


def _gptq(declared: Declared) -> Iterator[Rule]:
    """GPTQ as AutoGPTQ and GPTQModel write it; ``dynamic`` is GPTQModel's per-module settings."""
    layout = declared.text("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2") or declared.flag("is_marlin_format", False):
        raise declared.refuse(f"the GPTQ checkpoint format {show(layout)}")
    if declared.text("pack_dtype", "int32") != "int32":
        raise declared.refuse(f"GPTQ packed in {show(declared.raw['pack_dtype'])}")
    scheme = Scheme(
        layout="gptq",
        bits=declared.count("bits"),
        group_size=declared.group_size(declared.count("group_size")),
        # Without a word on it the zero points are read: right for either.
        symmetric=declared.flag("sym", False),
        zero_bias=1 if layout == "gptq" else 0,
        act_order=declared.flag("desc_act", False),
    )
    for name, raw in declared.table("dynamic").items():
        override = declared.inner(f"dynamic.{name}", raw)
        matches = declared.pattern(name.removeprefix("-:").removeprefix("+:")).match
        if name.startswith("-:"):
            yield Rule(matches=matches, scheme=None)
            continue
        changed = replace(
            scheme,
            bits=override.count("bits") if "bits" in raw else scheme.bits,
            group_size=(
                override.group_size(override.count("group_size"))
                if "group_size" in raw
                else scheme.group_size
            ),
            symmetric=override.flag("sym", scheme.symmetric),
            act_order=override.flag("desc_act", scheme.act_order),
        )
        yield Rule(matches=matches, scheme=_checked(override, changed))
    yield Rule(matches=_anything, scheme=_checked(declared, scheme))


def _awq(declared: Declared) -> Iterator[Rule]:
    """AWQ as AutoAWQ writes it. Which modules are kept in floating point shows in the tensors."""
    version = declared.text("version", "gemm")
    if version not in ("gemm", "gemv"):
        raise declared.refuse(f"the AWQ version {show(version)}")
    bits = declared.count("bits", "w_bit")
    if bits != 4:
        raise declared.refuse(f"AWQ with {bits} bits")
    if not declared.flag("zero_point", True):
        raise declared.refuse("AWQ without zero points")
    group = declared.group_size(declared.count("group_size", "q_group_size"))
    layout: Layout = "awq" if version == "gemm" else "gemv"
    if layout == "gemv" and not group:
        raise declared.refuse("AWQ gemv with one scale per row")
    scheme = Scheme(layout=layout, bits=bits, group_size=group, symmetric=False)
    yield Rule(matches=_anything, scheme=_checked(declared, scheme))


def _fp8(declared: Declared) -> Iterator[Rule]:
    """Block scales (``weight_scale_inv``, or ``scale`` in DeepSeek-V4's own files), or one scale
    per tensor (``weight_scale``). Which modules are kept in floating point shows in the tensors; so
    does, with ``expert_dtype: fp4``, which are 4-bit floats with a scale per 32."""
    element = declared.text("fmt", "e4m3")
    if element not in ("e4m3", "float8_e4m3fn"):
        raise declared.refuse(f"8-bit floats of the kind {show(element)}")
    scales = declared.text("scale_fmt", "float")
    if scales not in ("float", "ue8m0"):
        raise declared.refuse(f"scales of the kind {show(scales)}")
    experts = declared.text("expert_dtype", "fp8")
    if experts not in ("fp8", "fp4", "bf16"):
        raise declared.refuse(f"experts of the type {show(experts)}")
    block = declared.raw.get("weight_block_size")
    rows, group = (0, 0) if block is None else declared.block(block, "weight_block_size")
    # Exponents are stored as what they are; bytes without a name are so only if declared.
    types = (*FLOAT_SCALES, *(EXPONENT_SCALES if scales == "ue8m0" else EXPONENT_SCALES[:1]))
    scheme = Scheme(
        layout="plain" if block is None else "inverse",
        bits=8,
        group_size=group,
        symmetric=True,
        rows_per_scale=rows,
        element="e4m3",
        scale_types=types,
    )
    others = [replace(scheme, layout="scaled")]
    if experts == "fp4":
        others += [_mxfp(declared, layout, 4) for layout in ("inverse", "scaled")]
    yield Rule(matches=_anything, scheme=scheme, others=tuple(others))


def _bitsandbytes(declared: Declared) -> Iterator[Rule]:
    """Which modules are kept in floating point, and the block sizes, show in the tensors."""
    if declared.flag("load_in_8bit", declared.flag("_load_in_8bit", False)):
        yield Rule(
            matches=_anything, scheme=Scheme(layout="rows", bits=8, group_size=0, symmetric=True)
        )
        return
    if not declared.flag("load_in_4bit", declared.flag("_load_in_4bit", False)):
        raise declared.refuse("bitsandbytes with neither 4 nor 8 bits")
    nf4 = Scheme(layout="nf4", bits=4, group_size=0, symmetric=True, element="nf4")
    fp4 = replace(nf4, layout="fp4", element="fp4")
    yield Rule(matches=_anything, scheme=nf4, others=(fp4,))


def _mxfp(declared: Declared, layout: Layout, bits: int, group: int = 32) -> Scheme:
    """Floats of 4 or 8 bits that share an exponent of two, of the Open Compute Project's MX
    specification."""
    element: Element = "e2m1" if bits == 4 else "e4m3"
    return Scheme(
        layout=layout,
        bits=bits,
        group_size=declared.group_size(group),
        symmetric=True,
        element=element,
        scale_types=EXPONENT_SCALES,
    )


def _nvfp4(layout: Layout, factor: str, *, divides: bool) -> Scheme:
    """4-bit floats with an 8-bit float per 16 and one factor above them."""
    return Scheme(
        layout=layout,
        bits=4,
        group_size=16,
        symmetric=True,
        element="e2m1",
        scale_types=SMALL_SCALES,
        factor=factor,
        divides=divides,
    )


def _modelopt(declared: Declared) -> Iterator[Rule]:
    """ModelOpt's unified checkpoints. Which modules are kept in floating point shows in the
    tensors."""
    algorithm = declared.text("quant_algo", "").upper()
    if algorithm not in ("FP8", "MXFP8", "NVFP4"):
        raise declared.refuse(f"the ModelOpt algorithm {show(algorithm)}")
    wanted = {"MXFP8": 32, "NVFP4": 16}.get(algorithm)
    places = [declared]
    for name, raw in declared.table("config_groups").items():
        group = declared.inner(f"config_groups.{name}", raw)
        places.append(group.inner("weights", group.table("weights")))
    for place in places:
        size = place.raw.get("group_size")
        if wanted and size not in (None, wanted):
            raise place.refuse(f"{algorithm} with groups of {show(size)} instead of {wanted}")
    if algorithm == "NVFP4":
        scheme = _nvfp4("plain", "weight_scale_2", divides=False)
    elif algorithm == "MXFP8":
        scheme = _mxfp(declared, "plain", 8)
    else:
        scheme = Scheme(layout="plain", bits=8, group_size=0, symmetric=True, rows_per_scale=0,
                        element="e4m3")  # fmt: skip
    yield Rule(matches=_anything, scheme=scheme)


def _mxfp4(declared: Declared) -> Iterator[Rule]:
    """Stacked experts as gpt-oss has them; everything else is in floating point."""
    yield Rule(matches=_anything, scheme=_mxfp(declared, "blocks", 4))


_COMPRESSED_FORMATS: dict[str, Layout] = {
    "pack-quantized": "packed",
    "int-quantized": "plain",
    "float-quantized": "plain",
    "naive-quantized": "plain",
    "mxfp4-pack-quantized": "pairs",
    "mxfp8-quantized": "plain",
    "nvfp4-pack-quantized": "pairs",
}
_COMPRESSED_TYPES: dict[str, tuple[str, ...]] = {
    "pack-quantized": ("int",),
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
    "mxfp4-pack-quantized": ("float",),
    "mxfp8-quantized": ("float",),
    "nvfp4-pack-quantized": ("float",),
}
_COMPRESSED_BITS = {"mxfp4-pack-quantized": (4,), "nvfp4-pack-quantized": (4,)}


def _compressed_tensors(declared: Declared) -> Iterator[Rule]:
    """compressed-tensors: modules to ignore, then groups of target modules, each with its scheme.

    A module's own name goes before a pattern, and a pattern before the class of the module.
    """
    for key in ("sparsity_config", "transform_config"):
        settings = declared.table(key)
        empty = settings.get("format") == "dense" or settings.get("config_groups") == {}
        if settings and not empty:
            raise declared.refuse(f"compressed-tensors with a {key}")
    for name in declared.names("ignore"):
        yield Rule(matches=_target(declared, name)[1], scheme=None)
    ranked: list[tuple[int, Rule]] = []
    groups = declared.table("config_groups")
    if not groups:
        raise declared.fail("config_groups is missing or empty")
    for key, raw in groups.items():
        group = declared.inner(f"config_groups.{key}", raw)
        if group.raw.get("weights") is None:
            raise group.refuse("quantization of activations alone")
        layout = group.text("format", declared.text("format", ""))
        if layout not in _COMPRESSED_FORMATS:
            raise group.refuse(f"the compressed-tensors format {show(layout)}")
        scheme = _weights_scheme(group.inner("weights", raw["weights"]), layout)
        for name in group.names("targets"):
            rank, matches = _target(group, name)
            ranked.append((rank, Rule(matches=matches, scheme=scheme)))
    yield from (rule for _, rule in sorted(ranked, key=lambda item: item[0]))


def _weights_scheme(weights: Declared, layout: str) -> Scheme:
    kind, bits = weights.text("type", "int"), weights.count("num_bits")
    if kind not in _COMPRESSED_TYPES[layout]:
        raise weights.refuse(f"{layout} with the weight type {show(kind)}")
    if layout != "pack-quantized" and bits not in _COMPRESSED_BITS.get(layout, (8,)):
        raise weights.refuse(f"{layout} with {bits} bits")
    size = weights.first("group_size")
    if layout.startswith(("mxfp", "nvfp")):
        if not weights.flag("symmetric", True):
            raise weights.refuse(f"{layout} with zero points")
        wanted = 32 if layout.startswith("mxfp") else 16
        if size != wanted:
            raise weights.refuse(f"{layout} with groups of {show(size)} instead of {wanted}")
        if layout.startswith("nvfp"):
            return _nvfp4("pairs", "weight_global_scale", divides=True)
        return _mxfp(weights, _COMPRESSED_FORMATS[layout], bits)
    strategy = weights.text("strategy", "channel" if size in (None, -1) else "group")
    rows, group = 1, 0
    if strategy == "group":
        group = weights.group_size(weights.count("group_size"))
    elif strategy == "block":
        rows, group = weights.block(weights.raw.get("block_structure"), "block_structure")
    elif strategy == "tensor":
        rows = 0
    elif strategy != "channel":
        raise weights.refuse(f"the strategy {show(strategy)}")
    return _checked(
        weights,
        Scheme(
            layout=_COMPRESSED_FORMATS[layout],
            bits=bits,
            group_size=group,
            symmetric=weights.flag("symmetric", True),
            rows_per_scale=rows,
            element="e4m3" if kind == "float" else "int",
            act_order=weights.first("actorder") not in (None, False, "weight", "static"),
        ),
    )


#: class names under which every matrix of a decoder layer goes, and the output projection
_LINEAR = ("Linear", "LinearBase", "ParallelLMHead")
_NOT_LINEAR = re.compile(r"(^|\.)(embed_tokens|wte|embeddings?)$")


def _target(declared: Declared, name: str) -> tuple[int, Callable[[str], object]]:
    """(rank, test) of a target or an ignored name: 0 a module, 1 a pattern, 2 a class."""
    if name.startswith("re:"):
        return 1, declared.pattern(name.removeprefix("re:")).match
    if name in _LINEAR:
        return 2, lambda module: not _NOT_LINEAR.search(module)
    return 0, lambda module: module == name


_PARSERS: dict[str, Callable[[Declared], Iterator[Rule]]] = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}
