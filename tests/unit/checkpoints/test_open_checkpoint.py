"""What ``open_checkpoint`` makes of what is on disk, and what it says when it cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_bytes import entry, gguf, safetensors

from moestro.checkpoints import open_checkpoint
from moestro.checkpoints.packed import PackedCheckpoint
from moestro.core.errors import CheckpointError, InvalidRequest, UnsupportedFormat

WEIGHTS = safetensors({"t": entry("U8", [3], 0, 3)}, b"abc")


def test_paths_may_be_text_or_paths_and_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.safetensors").write_bytes(WEIGHTS)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (tmp_path / "m.safetensors", str(tmp_path / "m.safetensors"), "~/m.safetensors"):
        assert bytes(open_checkpoint(path).read("t").tolist()) == b"abc"


def test_whole_file_is_preferred_to_an_index_and_both_to_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    (tmp_path / "model.safetensors.index.json").write_text("broken")
    (tmp_path / "m.gguf").write_bytes(gguf())
    assert open_checkpoint(tmp_path).container == "safetensors"


def test_directory_with_one_gguf(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("x")
    (tmp_path / "m.gguf").write_bytes(gguf())
    assert open_checkpoint(tmp_path).container == "gguf"


def test_directory_with_several_ggufs_lists_them(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf", "c-00001-of-00002.gguf", "c-00002-of-00002.gguf"):
        (tmp_path / name).write_bytes(gguf())
    with pytest.raises(CheckpointError, match="holds 3 GGUF models; open one of them") as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path / "c-00001-of-00002.gguf") in str(caught.value)
    assert "c-00002" not in str(caught.value)


def test_a_later_part_without_the_first_is_still_found(tmp_path: Path) -> None:
    (tmp_path / "c-00002-of-00002.gguf").write_bytes(gguf())
    assert open_checkpoint(tmp_path).container == "gguf"


def test_packed_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """moestro.json decides, whatever lies beside it; its content is the packed reader's matter."""
    (tmp_path / "moestro.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    with pytest.raises(CheckpointError, match=r"moestro\.json"):
        open_checkpoint(tmp_path)
    opened: list[Path] = []
    monkeypatch.setattr(PackedCheckpoint, "open", opened.append)
    open_checkpoint(tmp_path)
    open_checkpoint(tmp_path / "moestro.json")
    assert opened == [tmp_path, tmp_path]


@pytest.mark.parametrize(
    "text",
    [
        "/nowhere/at/all",
        "./a/b",
        "nowhere",
        "a/b/c",
        "a/b.gguf",
        "dir/model.safetensors",
        "",
        "a\0b",
        "~nobody-of-this-name/x",
    ],
)
def test_missing_path(text: str) -> None:
    with pytest.raises(CheckpointError, match="does not exist; give a directory"):
        open_checkpoint(text)


def test_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is an empty directory"):
        open_checkpoint(tmp_path)


def test_directory_without_a_model_lists_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"is it the right.*found: config\.json, notes\.txt"):
        open_checkpoint(tmp_path)


def test_shards_without_index(tmp_path: Path) -> None:
    for i in (1, 2):
        (tmp_path / f"model-0000{i}-of-00002.safetensors").write_bytes(WEIGHTS)
    with pytest.raises(CheckpointError, match=r"2 \.safetensors files but no index"):
        open_checkpoint(tmp_path)


def test_single_file_of_another_name(tmp_path: Path) -> None:
    (tmp_path / "consolidated.safetensors").write_bytes(WEIGHTS)
    with pytest.raises(CheckpointError, match=r"to open consolidated\.safetensors on its own"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_say_how_to_convert(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02}q\x00.")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UnsupportedFormat, match=r"is a pickle.*from_pretrained\(.*save_pre"):
            open_checkpoint(path)


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"onnx")
    with pytest.raises(UnsupportedFormat, match=r"\.onnx files are not read"):
        open_checkpoint(tmp_path / "model.onnx")
    (tmp_path / "notes.txt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"neither a \.safetensors nor a GGUF file"):
        open_checkpoint(tmp_path / "notes.txt")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"neither a \.safetensors nor a GGUF file"):
        open_checkpoint(tmp_path / "empty")


def test_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    with pytest.raises(CheckpointError, match=r"model\.safetensors links to a file that does not"):
        open_checkpoint(tmp_path)


def test_revision_of_a_local_path(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf())
    with pytest.raises(InvalidRequest, match="is on disk, so revision 'main' cannot be chosen"):
        open_checkpoint(tmp_path, revision="main")


def test_importing_the_readers_does_not_import_the_hub() -> None:
    code = "import sys, moestro.checkpoints; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
