"""Packed directories: what is read, and that nothing wrong with one goes unnoticed."""

import copy
import json

import packed_directories as packed
import pytest
import torch
from safetensors import safe_open

from moestro.checkpoints import open_checkpoint
from moestro.checkpoints.packed import PackedCheckpoint
from moestro.core.errors import CheckpointError, InvalidRequest, UnsupportedFormat


@pytest.fixture
def directory(tmp_path):
    return packed.write(tmp_path / "model")


def test_open_finds_the_container_by_its_manifest(directory):
    for path in (directory, directory / "moestro.json"):
        checkpoint = open_checkpoint(path)
        assert isinstance(checkpoint, PackedCheckpoint)
        assert checkpoint.container == "packed" and checkpoint.architecture == "tiny"
        assert checkpoint.config_container == "safetensors"
        assert checkpoint.config["limit"] == float("inf")
        assert checkpoint.names() == ["norm", "q", "layers.0.experts"]


def test_entries_and_bytes(directory):
    with PackedCheckpoint.open(directory) as checkpoint:
        entry = checkpoint.entry("q")
        assert (entry.kind, entry.format_name, entry.shape) == ("matrix", "int4-g32", (16, 32))
        assert entry.relative_error == 0.08
        assert checkpoint.read("q").numpy().tobytes() == packed.MATRIX
        assert checkpoint.read("norm").numpy().tobytes() == packed.VECTOR
        experts = checkpoint.entry("layers.0.experts")
        assert (experts.blob_nbytes, experts.shape) == (4096, (3, 16, 32))
        assert [(p.rows, p.cols, p.offset) for p in experts.parts] == [
            (16, 32, 0), (16, 32, 320), (32, 16, 640),
        ]  # fmt: skip


def test_experts_are_read_by_range_and_matrices_only_whole(directory):
    with PackedCheckpoint.open(directory) as checkpoint:
        two = checkpoint.read("layers.0.experts", (1, 3))
        assert two.numpy().tobytes() == packed.EXPERTS[4096:]
        with pytest.raises(InvalidRequest, match="q is packed in tiles"):
            checkpoint.read("q", (0, 1))
        with pytest.raises(InvalidRequest, match="its first axis has 3"):
            checkpoint.read("layers.0.experts", (0, 4))
        with pytest.raises(CheckpointError, match="nearest: 'q'"):
            checkpoint.entry("qq")


def test_other_tools_can_read_the_shared_file(directory):
    with safe_open(directory / "shared.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("norm"), torch.zeros(16))
        assert file.get_tensor("q").numpy().tobytes() == packed.MATRIX


def test_verify_reads_everything_and_finds_one_flipped_bit(directory):
    calls = []
    checkpoint = PackedCheckpoint.open(directory)
    checkpoint.verify(lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] == sum(map(len, packed.files().values()))
    data = bytearray(packed.EXPERTS)
    data[5000] ^= 4
    (directory / "experts-000.bin").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"experts-000\.bin is damaged"):
        PackedCheckpoint.open(directory).verify()


@pytest.mark.parametrize("name", ["config.json", "shared.safetensors", "experts-000.bin"])
@pytest.mark.parametrize("change", ["cut", "grown", "gone"])
def test_files_of_another_size_are_refused(directory, name, change):
    path = directory / name
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if change == "cut" else path.read_bytes() + b" ")
    with pytest.raises(CheckpointError, match=name):
        PackedCheckpoint.open(directory)


def test_a_newer_version_says_so(directory):
    body = packed.manifest(packed.files())
    body["format_version"] = 2
    packed.write(directory, body)
    with pytest.raises(UnsupportedFormat, match="format version 2, this Moestro reads 1"):
        PackedCheckpoint.open(directory)


def test_every_field_of_the_manifest_is_checked(directory):
    """Each field replaced by values of wrong type or size: a CheckpointError or still the truth."""
    body = packed.manifest(packed.files())
    wrong = [None, True, -1, 1 << 70, 1.5, "../x", "", [], {}, [0], [1] * 9, 10**7]
    refused = tried = 0

    def visit(node, path):
        if isinstance(node, dict):
            for key in node:
                yield [*path, key]
                yield from visit(node[key], [*path, key])
        if isinstance(node, list):
            for index in range(len(node)):
                yield [*path, index]
                yield from visit(node[index], [*path, index])

    for path in list(visit(body, [])):
        for value in wrong:
            changed = copy.deepcopy(body)
            node = changed
            for step in path[:-1]:
                node = node[step]
            if node[path[-1]] == value:
                continue
            node[path[-1]] = value
            packed.write(directory, changed)
            tried += 1
            try:
                PackedCheckpoint.open(directory).close()
            except (CheckpointError, UnsupportedFormat) as error:
                assert "moestro.json" in str(error) or "model" in str(error)
                refused += 1
    assert tried > 400 and refused > tried * 0.6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["weights"]["q"].update(offset=1 << 40), "ends at byte"),
        (lambda m: m["weights"]["q"].update(offset=0, nbytes=352), "overlap"),
        (lambda m: m["weights"]["q"].update(file="nowhere.bin"), "not listed"),
        (lambda m: m["weights"]["norm"].update(shape=[15]), "vector 'norm'"),
        (lambda m: m["weights"]["q"].update(kind="sparse"), "unknown kind"),
        (lambda m: m["weights"]["q"].update(shape=[16]), r"matrix 'q' has the shape \[16\]"),
        (lambda m: m["weights"]["layers.0.experts"].update(blob_nbytes=4095), "are not 12288"),
        (lambda m: m["weights"]["layers.0.experts"]["parts"].pop(), "gate, up and down"),
        (
            lambda m: m["files"].update({"../evil": m["files"].pop("config.json")}),
            "plain file name",
        ),
        (lambda m: m["files"].pop("config.json"), r"does not list config\.json"),
        (lambda m: m.update(config_container="onnx"), "config_container"),
        (lambda m: m.pop("fingerprint"), "fingerprint"),
    ],
)
def test_inconsistent_manifests(directory, change, message):
    body = packed.manifest(packed.files())
    change(body)
    packed.write(directory, body)
    with pytest.raises(CheckpointError, match=message):
        PackedCheckpoint.open(directory)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"format_version": 1, "format_version": 1}', "\0"]
)
def test_manifests_that_are_not_json(directory, text):
    packed.write(directory, text)
    with pytest.raises(CheckpointError, match=r"moestro\.json"):
        PackedCheckpoint.open(directory)


def test_cut_manifests(directory):
    text = json.dumps(packed.manifest(packed.files()))
    for length in range(0, len(text) - 1, 97):
        packed.write(directory, text[:length])
        with pytest.raises(CheckpointError):
            PackedCheckpoint.open(directory)
