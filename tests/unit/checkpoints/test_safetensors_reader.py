"""The safetensors reader against the safetensors package, and each way a file can be wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_bytes import Memory, entry, safetensors
from safetensors import safe_open
from safetensors.torch import save_file

from moestro.checkpoints import open_checkpoint
from moestro.checkpoints.safetensors import DTYPE_BITS, SafetensorsCheckpoint, parse_header
from moestro.core.errors import CheckpointError, InvalidRequest, UnsupportedFormat

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def make_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(), (0, 4), (7,), (3, 5), (2, 3, 4), (1, 1, 2, 3)]
    out = {}
    for name, dtype in DTYPES.items():
        for i, shape in enumerate(shapes):
            value = torch.randint(0, 2, shape, generator=generator).to(dtype)
            out[f"{name}.{i}"] = value
    out["ünïcode 名"] = torch.arange(4.0)
    return out


def raw_bytes(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors = {"a": torch.randn(4, 6), "b": torch.randn(8).half(), "c": torch.randn(3, 2, 2)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "mixtral", "x": [1, 2]}')
    return tmp_path


def test_matches_the_safetensors_package(tmp_path: Path) -> None:
    tensors = make_tensors()
    path = tmp_path / "some.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    with open_checkpoint(path) as opened, safe_open(path, framework="pt") as oracle:
        assert sorted(opened.names()) == sorted(oracle.keys())
        for name in opened.names():
            info = opened.info(name)
            assert info.shape == tuple(oracle.get_slice(name).get_shape())
            assert info.dtype == oracle.get_slice(name).get_dtype()
            assert info.file == path
            assert torch.equal(opened.read(name), raw_bytes(oracle.get_tensor(name)))


def test_every_dtype_of_the_format_has_its_size() -> None:
    for dtype, bits in DTYPE_BITS.items():
        infos = parse_header(Memory(safetensors({"t": entry(dtype, [8], 0, bits)}, bytes(bits))))
        assert infos["t"].nbytes == bits and infos["t"].dtype == dtype


def test_names_are_in_disk_order() -> None:
    header = {"b": entry("U8", [2], 1, 3), "a": entry("U8", [1], 3, 4), "c": entry("U8", [1], 0, 1)}
    assert list(parse_header(Memory(safetensors(header, bytes(4))))) == ["c", "b", "a"]


def test_row_ranges(model: Path) -> None:
    with SafetensorsCheckpoint.open(model) as opened:
        whole = {name: opened.read(name) for name in opened.names()}
        assert torch.equal(opened.read("a", (1, 3)), whole["a"][24:72])
        assert torch.equal(opened.read("b", (0, 8)), whole["b"])
        assert torch.equal(opened.read("c", (2, 3)), whole["c"][32:48])
        assert opened.read("c", (3, 3)).numel() == 0
        for rows in [(0, 5), (-1, 2), (3, 2)]:
            with pytest.raises(InvalidRequest, match=r"'a'.*first axis has 4"):
                opened.read("a", rows)


def test_reads_are_fresh_memory(model: Path) -> None:
    with SafetensorsCheckpoint.open(model) as opened:
        first = opened.read("a")
        before = first.clone()
        first.zero_()
        assert torch.equal(opened.read("a"), before)


def test_config_and_architecture(model: Path) -> None:
    opened = open_checkpoint(model)
    assert opened.container == "safetensors"
    assert opened.path == model
    assert opened.architecture == "mixtral"
    assert opened.config["x"] == [1, 2]
    with pytest.raises(TypeError):
        opened.config["x"] = 1  # type: ignore[index]


def test_architecture_without_config_says_so(model: Path) -> None:
    (model / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        _ = open_checkpoint(model).architecture
    (model / "config.json").write_text('{"vocab_size": 3}')
    with pytest.raises(CheckpointError, match="does not name a model_type"):
        _ = open_checkpoint(model / "model.safetensors").architecture


@pytest.mark.parametrize("text", ["[1]", "{", '"x"', "\xff", "[" * 100_000])
def test_a_broken_config_is_named(model: Path, text: str) -> None:
    (model / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(model)


def test_config_with_infinity_opens(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "x", "time_step_limit": [0.0, Infinity]}')
    assert open_checkpoint(model).architecture == "x"


def test_unknown_name_suggests_the_nearest(model: Path) -> None:
    opened = open_checkpoint(model)
    with pytest.raises(CheckpointError, match=r"no tensor 'zzzzzz'; it holds 3, such as 'a'"):
        opened.info("zzzzzz")
    save_file({"model.layers.1.mlp.gate.weight": torch.ones(1)}, model / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"nearest: 'model.layers.1.mlp.gate.weight'"):
        open_checkpoint(model).read("model.layers.1.mlp.gates.weight")


def test_closed_checkpoint(model: Path) -> None:
    opened = open_checkpoint(model)
    opened.close()
    opened.close()
    with pytest.raises(CheckpointError, match="has been closed"):
        opened.read("a")


def test_file_cut_while_open(model: Path) -> None:
    opened = open_checkpoint(model)
    last = opened.names()[-1]
    os.truncate(model / "model.safetensors", opened.info(last).offset + 1)
    with pytest.raises(CheckpointError, match="was changed or cut while open"):
        opened.read(last)


def save_shards(path: Path, index: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    tensors = {f"t{i}": torch.randn(3, i + 1) for i in range(5)}
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for shard, part in zip(names, (["t0", "t3"], ["t1", "t2", "t4"]), strict=True):
        save_file({k: tensors[k] for k in part}, path / shard)
    weight_map = {k: names[0] if k in ("t0", "t3") else names[1] for k in tensors}
    value = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index or value))
    return tensors


def test_sharded(tmp_path: Path) -> None:
    tensors = save_shards(tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        with open_checkpoint(path) as opened:
            assert set(opened.names()) == set(tensors)
            for name, value in tensors.items():
                assert torch.equal(opened.read(name), raw_bytes(value))
            assert opened.info("t3").file.name == "model-00001-of-00002.safetensors"


def test_missing_shard_is_named(tmp_path: Path) -> None:
    save_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of which are missing: model-00002-of-00002"):
        open_checkpoint(tmp_path)


def test_index_naming_a_tensor_that_is_not_in_its_shard(tmp_path: Path) -> None:
    save_shards(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["t9"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"places 1 tensors in .* not there.*'t9'"):
        open_checkpoint(tmp_path)


def test_tensors_beyond_the_index_are_not_part_of_it(tmp_path: Path) -> None:
    save_shards(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["t4"]
    path.write_text(json.dumps(index))
    assert "t4" not in open_checkpoint(tmp_path).names()


@pytest.mark.parametrize(
    "shard",
    ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\\b", "a\0b", "x" * 5000],
)
def test_shards_outside_the_directory_are_refused(tmp_path: Path, shard: str) -> None:
    save_shards(tmp_path, {"weight_map": {"t0": shard}})
    with pytest.raises(CheckpointError, match=r"plain file names|missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"t0": 3}}, "not a name"),
        ({"weight_map": ["t0"]}, "no weight_map"),
        ({"weight_map": {}}, "no weight_map"),
        ({"x": 1}, "no weight_map"),
    ],
)
def test_malformed_index(tmp_path: Path, index: dict[str, Any], message: str) -> None:
    save_shards(tmp_path, index)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("quark", r"with quark \(AMD Quark; bits=4, group_size=128\), which is not read yet"),
        ("bitsandbytes", "bitsandbytes with neither 4 nor 8 bits is not read"),
        (
            "bits-of-mine",
            "quantized with 'bits-of-mine'; methods that are read: awq, bitsandbytes, "
            "compressed-tensors, fp8, gptq",
        ),
        (None, "by a method it does not name"),
        (["x"], r"quantized with \['x'\]"),
    ],
)
def test_quantized_checkpoints_are_refused_by_name(model: Path, method: Any, message: str) -> None:
    declared = {"quant_method": method, "bits": 4, "group_size": 128}
    for config in (
        {"model_type": "x", "quantization_config": declared},
        {"model_type": "x", "text_config": {"quantization_config": declared}},
        {"model_type": "x", "compression_config": declared},
    ):
        (model / "config.json").write_text(json.dumps(config))
        for path in (model, model / "model.safetensors"):
            with pytest.raises(UnsupportedFormat, match=message):
                open_checkpoint(path)


def test_an_empty_quantization_config_declares_nothing(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "x", "quantization_config": null}')
    assert open_checkpoint(model).architecture == "x"


F = entry("F32", [2], 0, 8)
BAD_HEADERS = {
    "too few": b"\1\2\3",
    "header of 18446744073709551615 bytes": safetensors({}, length=(1 << 64) - 1),
    "header of 3 bytes, but has 10": safetensors(b"{}", length=3),
    "not a JSON object": safetensors(b"[1]"),
    "its header is not a JSON object": safetensors(b' {"a": 1}'),
    "not valid JSON": safetensors(b"{,}"),
    "'utf-8' codec": safetensors(b'{"\xff": 1}'),
    "nested too deeply": safetensors(b'{"a":' + b"[" * 200_000),
    "the key 'a' occurs twice": safetensors(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        bytes(2),
    ),
    "the key 'shape' occurs twice": safetensors(b'{"a":{"shape":[1],"shape":[2]}}'),
    "a number of 5000 digits": safetensors(b'{"a":' + b"9" * 5000 + b"}"),
    "NaN is not JSON": safetensors(b'{"a":NaN}'),
    "__metadata__": safetensors({"__metadata__": {"a": 1}}),
    "does not declare dtype": safetensors({"a": {"dtype": "F32", "shape": [1]}}),
    "tensor 'a' does not declare": safetensors({"a": 3}),
    "shape \\[-1\\]": safetensors({"a": entry("U8", [-1], 0, 0)}),
    "shape \\[1.5\\]": safetensors({"a": {**F, "shape": [1.5]}}, bytes(8)),
    "shape \\[True\\]": safetensors({"a": {**F, "shape": [True]}}, bytes(8)),
    "the shape '2'": safetensors({"a": {**F, "shape": "2"}}, bytes(8)),
    "the shape \\[1, 1, .*characters": safetensors({"a": {**F, "shape": [1] * 65}}, bytes(8)),
    "data_offsets \\[8\\]": safetensors({"a": {**F, "data_offsets": [8]}}, bytes(8)),
    "data_offsets \\[-8, 0\\]": safetensors({"a": {**F, "data_offsets": [-8, 0]}}, bytes(8)),
    "data bytes 8 to 0": safetensors({"a": {**F, "data_offsets": [8, 0]}}, bytes(8)),
    "data bytes 0 to 8, but the file has 7": safetensors({"a": F}, bytes(7)),
    "needs 12 bytes, but its data_offsets give 8": safetensors(
        {"a": entry("F32", [3], 0, 8)}, bytes(8)
    ),
    "needs [0-9]+\\.\\.\\. ": safetensors({"a": entry("F32", [1 << 62] * 60, 0, 8)}, bytes(8)),
    "needs 2 bytes, but its data_offsets give 1": safetensors(
        {"a": entry("F4", [3], 0, 1)}, bytes(1)
    ),
    "'a' \\(bytes .*\\) and 'b' .* overlap": safetensors(
        {"a": F, "b": entry("F32", [2], 4, 12)}, bytes(12)
    ),
    "'a' \\(bytes .*\\) and 'twin' .* overlap": safetensors({"a": F, "twin": F}, bytes(16)),
    "cover 16 of 20": safetensors({"a": F, "b": entry("F32", [2], 12, 20)}, bytes(20)),
    "cover 8 of 9": safetensors({"a": F}, bytes(9)),
}


@pytest.mark.parametrize("message", BAD_HEADERS)
def test_bad_headers(tmp_path: Path, message: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(BAD_HEADERS[message])
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 800


def test_unknown_dtype_names_tensor_and_dtype() -> None:
    for dtype in ("F9", 7, ["F32"], {"a": 1}):
        data = safetensors({"a": {**F, "dtype": dtype}}, bytes(8))
        with pytest.raises(UnsupportedFormat, match=r"tensor 'a' has dtype .*known: F4"):
            parse_header(Memory(data))


def test_a_failed_open_closes_its_files(tmp_path: Path) -> None:
    save_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"broken")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert caught.value
    assert len(os.listdir("/proc/self/fd")) == before


def test_directories_pipes_and_unreadable_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(tmp_path)
