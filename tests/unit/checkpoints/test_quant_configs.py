"""quantization_config as the methods write it: facts, per-module decisions, refusals."""

from __future__ import annotations

from typing import Any

import pytest

import slow_quantizers as slow
from moestro.checkpoints.quant_configs import KNOWN_METHODS, READ_METHODS, read_quantization
from moestro.core.errors import CheckpointError, UnsupportedFormat

Config = dict[str, Any]


def read(declared: Any):
    quantization = read_quantization({"quantization_config": declared}, "config.json")
    assert quantization is not None
    return quantization


def gptq(**more: Any) -> Config:
    return slow.gptq_config(bits=4, group=128, symmetric=True) | more


def compressed(**more: Any) -> Config:
    return slow.compressed_config(bits=4, group=32, symmetric=True) | more


def test_nothing_declared():
    assert read_quantization({"model_type": "x", "quantization_config": {}}, "config.json") is None


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "name"),
    [
        (4, 32, True, "int4-g32"),
        (4, 64, False, "int4z-g64"),
        (4, -1, True, "int4-row"),
        (4, -1, False, "int4z-g128"),
        (4, 1024, True, "int4-g128"),
        (4, 192, True, "int4-g64"),
        (8, 128, True, "int8-g128"),
        (8, -1, True, "int8-row"),
        (8, 64, False, "int8z-g64"),
        (8, -1, False, "int8z-g128"),
    ],
)
def test_the_format_that_holds_a_scheme(bits: int, group: int, symmetric: bool, name: str):
    scheme = read(slow.gptq_config(bits=bits, group=group, symmetric=symmetric)).scheme("a")
    assert scheme is not None and scheme.format_name == name


def test_gptq_facts():
    scheme = read(gptq()).scheme("model.layers.0.mlp.gate_proj")
    assert scheme is not None
    assert (scheme.bits, scheme.group_size, scheme.symmetric) == (4, 128, True)
    assert (scheme.zero_bias, scheme.act_order) == (1, False)
    second = read(gptq(checkpoint_format="gptq_v2", desc_act=True)).scheme("a")
    assert second is not None and (second.zero_bias, second.act_order) == (0, True)


def test_gptq_per_module_settings():
    """The first pattern that matches from the start of the name decides."""
    dynamic = {
        r"-:.*mlp\.gate$": {},
        r"+:.*\.0\..*down_proj": {"bits": 8, "group_size": 32},
        r".*\.1\..*": {"group_size": -1, "sym": False},
    }
    quantization = read(gptq(dynamic=dynamic))

    def name(module: str) -> str | None:
        scheme = quantization.scheme(module)
        return None if scheme is None else scheme.format_name

    assert name("model.layers.1.mlp.gate") is None
    assert name("model.layers.1.mlp.gate_proj") == "int4z-g128"
    assert name("model.layers.0.mlp.down_proj") == "int8-g32"
    assert name("model.layers.1.mlp.down_proj") == "int4z-g128"
    assert name("model.layers.2.mlp.down_proj") == "int4-g128"


def test_awq_in_either_spelling():
    for declared in (
        slow.awq_config(group=64),
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"},
    ):
        scheme = read(declared).scheme("a")
        assert scheme is not None
        assert (scheme.layout, scheme.format_name) == ("awq", "int4z-g64")


def test_compressed_groups_and_ignored_modules():
    def group(targets: list[str], **weights: Any) -> Config:
        return {"targets": targets, "weights": slow.weights_config(**weights)}

    declared = compressed(
        ignore=["lm_head", r"re:.*mlp\.gate$"],
        config_groups={
            "all": group(["Linear"], bits=4, group=128, symmetric=True),
            "attention": group([r"re:.*self_attn\..*"], bits=8, group=-1, symmetric=True),
            "one": group(["model.layers.0.self_attn.q_proj"], bits=4, group=32, symmetric=False),
        },
    )
    quantization = read(declared)

    def name(module: str) -> str | None:
        scheme = quantization.scheme(module)
        return None if scheme is None else scheme.format_name

    assert name("lm_head") is None
    assert name("model.layers.0.mlp.gate") is None
    assert name("model.embed_tokens") is None
    assert name("model.layers.0.mlp.gate_proj") == "int4-g128"
    assert name("model.layers.1.self_attn.q_proj") == "int8-row"
    assert name("model.layers.0.self_attn.q_proj") == "int4z-g32"


def test_compressed_groups_may_have_formats_of_their_own():
    groups = compressed()["config_groups"]
    groups["group_1"] = {
        "targets": [r"re:.*k_proj"],
        "format": "int-quantized",
        "weights": slow.weights_config(bits=8, group=-1, symmetric=True),
        "input_activations": {"num_bits": 8, "type": "int", "dynamic": True},
    }
    groups["group_0"]["format"] = "pack-quantized"
    quantization = read(compressed(format="mixed-precision", config_groups=groups))
    first, second = quantization.scheme("a.q_proj"), quantization.scheme("a.k_proj")
    assert first is not None and second is not None
    assert (first.layout, second.layout) == ("packed", "plain")


def test_8_bit_floats():
    block = read({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]})
    scheme = block.scheme("a")
    assert scheme is not None and scheme.is_float
    assert (scheme.layout, scheme.rows_per_scale, scheme.group_size) == ("inverse", 128, 128)
    assert scheme.format_name == "fp8-g128"
    tensor = read({"quant_method": "fp8", "activation_scheme": "static"}).scheme("a")
    assert tensor is not None
    assert (tensor.layout, tensor.rows_per_scale, tensor.format_name) == ("plain", 0, "fp8-row")
    for strategy, rows, name in (("channel", 1, "row"), ("tensor", 0, "row"), ("block", 64, "g32")):
        declared = weights(num_bits=8, type="float", strategy=strategy, block_structure=[64, 32])
        found = read({**declared, "format": "float-quantized"}).scheme("a")
        assert found is not None
        assert (found.rows_per_scale, found.format_name) == (rows, f"fp8-{name}")


def test_4_bit_floats():
    stacked = read({"quant_method": "mxfp4"}).scheme("model.layers.0.mlp.experts.down_proj")
    assert stacked is not None and stacked.is_float
    assert (stacked.layout, stacked.group_size, stacked.format_name) == ("blocks", 32, "mxfp4")
    declared = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for config in (
        {"expert_dtype": "fp4", "quantization_config": declared},
        {"text_config": {"expert_dtype": "fp4", "quantization_config": declared}},
    ):
        quantization = read_quantization(config, "config.json")
        assert quantization is not None
        names = [scheme.format_name for scheme in quantization.schemes("a")]
        assert names == ["fp8-g128", "fp8-g128", "mxfp4", "mxfp4"]
    plain = read_quantization({"quantization_config": declared}, "config.json")
    assert plain is not None
    assert {scheme.format_name for scheme in plain.schemes("a")} == {"fp8-g128"}


def test_a_declaration_repeated_in_a_part_of_the_model():
    same = {"quantization_config": gptq(), "text_config": {"quantization_config": gptq()}}
    assert read_quantization(same, "config.json") is not None
    other = {**same, "text_config": {"quantization_config": gptq(group_size=32)}}
    with pytest.raises(CheckpointError, match="contradict each other"):
        read_quantization(other, "config.json")


def weights(**more: Any) -> Config:
    declared = compressed()
    declared["config_groups"]["group_0"]["weights"] |= more
    return declared


REFUSED = {
    "integers of 3 bits": gptq(bits=3),
    "zero points beside 8 bits, one scale per row, e4m3": weights(
        num_bits=8, type="float", strategy="channel", symmetric=False
    )
    | {"format": "float-quantized"},
    "ModelOpt algorithm 'W4A16_AWQ'": {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
    "NVFP4 with groups of 32": {"quant_method": "modelopt", "quant_algo": "NVFP4",
                                "group_size": 32},
    "MXFP8 with groups of 16": {"quant_method": "modelopt", "quant_algo": "MXFP8",
                                "config_groups": {"g": {"weights": {"group_size": 16}}}},
    "group size 16": gptq(group_size=16),
    "group size 48": gptq(group_size=48),
    "group size 0": gptq(group_size=0),
    "GPTQ checkpoint format 'marlin'": gptq(checkpoint_format="marlin"),
    "GPTQ checkpoint format 'gptq'": gptq(is_marlin_format=True),
    "GPTQ packed in 'int64'": gptq(pack_dtype="int64"),
    "integers of 2 bits": gptq(dynamic={"+:a": {"bits": 2}}),
    "AWQ version 'gemv_fast'": slow.awq_config(group=32) | {"version": "gemv_fast"},
    "AWQ gemv with one scale": slow.awq_config(group=-1) | {"version": "gemv"},
    "AWQ with 8 bits": slow.awq_config(group=32) | {"bits": 8},
    "AWQ without zero points": slow.awq_config(group=32) | {"zero_point": False},
    "float-quantized with the weight type 'int'": compressed(format="float-quantized"),
    "pack-quantized with the weight type 'float'": weights(type="float"),
    "naive-quantized with the weight type 'nf4'": compressed(format="naive-quantized")
    | {"config_groups": weights(type="nf4")["config_groups"]},
    "compressed-tensors format 'marlin-24'": compressed(format="marlin-24"),
    "compressed-tensors format ''": compressed(format=None),
    "compressed-tensors with a sparsity_config": compressed(sparsity_config={"format": "2:4"}),
    "compressed-tensors with a transform_config": compressed(
        transform_config={"config_groups": {"u": {}}}
    ),
    "integers of 7 bits": weights(num_bits=7),
    "strategy 'token'": weights(strategy="token"),
    "zero points beside 4 bits, one scale per all x all": weights(
        strategy="tensor", symmetric=False
    ),
    "8-bit floats of the kind 'e5m2'": {"quant_method": "fp8", "fmt": "e5m2"},
    "scales of the kind 'log'": {"quant_method": "fp8", "scale_fmt": "log"},
    "experts of the type 'int3'": {"quant_method": "fp8", "expert_dtype": "int3"},
    "weight_block_size \\[0, 128\\]": {"quant_method": "fp8", "weight_block_size": [0, 128]},
    "group size 16 ": {"quant_method": "fp8", "weight_block_size": [128, 16]},
    "group size 24": weights(group_size=24),
    "int-quantized with 4 bits": compressed(format="int-quantized"),
    "activations alone": compressed(config_groups={"g": {"targets": [], "weights": None}}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_are_not_read_are_refused_by_name(message: str):
    with pytest.raises(UnsupportedFormat, match=message) as error:
        read(REFUSED[message])
    assert "open the float checkpoint" in str(error.value)


MALFORMED = {
    "bits is '4', not a number": gptq(bits="4"),
    "bits is True, not a number": gptq(bits=True),
    "bits is None, not a number": gptq(bits=None),
    "group_size is 1.5": gptq(group_size=1.5),
    "sym is 1, not true or false": gptq(sym=1),
    "checkpoint_format is 2, not a text": gptq(checkpoint_format=2),
    "dynamic is \\[\\], not an object": gptq(dynamic=[]),
    "dynamic.a is 3, not an object": gptq(dynamic={"a": 3}),
    "'\\(' is not a regular expression": gptq(dynamic={"-:(": {}}),
    "ignore is 'lm_head', not a list of names": compressed(ignore="lm_head"),
    "config_groups is missing or empty": compressed(config_groups={}),
    "config_groups.g is 1, not an object": compressed(config_groups={"g": 1}),
    "targets is \\[1\\], not a list": compressed(
        config_groups={"g": {"targets": [1], "weights": slow.weights_config(
            bits=4, group=32, symmetric=True)}}
    ),
    "num_bits is None": weights(num_bits=None),
    "block_structure is None": weights(strategy="block"),
    "weight_block_size is 128": {"quant_method": "fp8", "weight_block_size": 128},
}  # fmt: skip


@pytest.mark.parametrize("message", MALFORMED)
def test_malformed_declarations(message: str):
    with pytest.raises(CheckpointError, match=message):
        read(MALFORMED[message])


def test_method_names_are_read_or_refused():
    for method in KNOWN_METHODS:
        with pytest.raises(UnsupportedFormat, match=f"quantized with {method} .*not read yet"):
            read({"quant_method": method})
    assert not KNOWN_METHODS.keys() & READ_METHODS.keys()
    with pytest.raises(UnsupportedFormat, match="is list, not an object"):
        read(["gptq"])
