"""Conversions that are interrupted or refused: what is kept, what is removed, what is untouched."""

import errno
import fcntl
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_checkpoints import save_model, tiny_model, vector

from moestro.checkpoints import open_checkpoint
from moestro.core.errors import CheckpointError, InvalidRequest, OutOfBudget
from moestro.memory.convert import convert
from moestro.memory.loader import load_weights
from moestro.memory.policy import FormatPolicy

KEEP = FormatPolicy.parse("")
MIXED = FormatPolicy.parse("experts=int4-g32,attention=int8-g32,embedding=bf16")


def interrupted(model, out: Path) -> None:
    """Leave an unfinished conversion behind."""
    source, specs, _ = model

    def stop(done: int, total: int) -> None:
        if done > total * 0.8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, specs, out, policy=MIXED, progress=stop)
    assert out.with_name(out.name + ".partial").is_dir() and not out.exists()


def test_unfinished_work_with_other_formats_is_not_mixed_in(model, tmp_path):
    source, specs, _ = model
    interrupted(model, tmp_path / "out")
    with pytest.raises(InvalidRequest, match=r"out\.partial holds an unfinished conversion"):
        convert(source, specs, tmp_path / "out", policy=KEEP)
    assert convert(source, specs, tmp_path / "out", policy=MIXED).resumed == 2


def test_unfinished_work_on_a_changed_source_is_not_mixed_in(model, tmp_path):
    source, specs, _ = model
    interrupted(model, tmp_path / "out")
    os.utime(tmp_path / "source" / "model.safetensors", ns=(1, 1))
    with pytest.raises(InvalidRequest, match="unfinished conversion of another model"):
        convert(source, specs, tmp_path / "out", policy=MIXED)


def test_a_finished_conversion_is_not_done_again(model, tmp_path):
    source, specs, _ = model
    first = convert(source, specs, tmp_path / "out", policy=MIXED)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    again = convert(source, specs, tmp_path / "out", policy=MIXED)
    assert again.weights == first.weights and again.resumed == 3
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    with pytest.raises(InvalidRequest, match="holds another packed model"):
        convert(source, specs, tmp_path / "out", policy=KEEP)


def test_outputs_that_are_something_else_are_refused_and_untouched(model, tmp_path):
    source, specs, _ = model
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="not empty and not a packed model"):
        convert(source, specs, tmp_path / "full")
    with pytest.raises(InvalidRequest, match="is not a directory"):
        convert(source, specs, tmp_path / "file")
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("years of work")
    with pytest.raises(InvalidRequest, match="is no unfinished conversion"):
        convert(source, specs, tmp_path / "out")
    for name in ("full", "out.partial"):
        assert (tmp_path / name / "thesis.txt").read_text() == "years of work"


def test_an_empty_output_directory_is_used(model, tmp_path):
    source, specs, _ = model
    (tmp_path / "out").mkdir()
    convert(source, specs, tmp_path / "out", policy=KEEP)
    assert open_checkpoint(tmp_path / "out").names()


def test_unwritable_outputs(model, tmp_path):
    source, specs, _ = model
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="cannot be written: Not a directory"):
        convert(source, specs, tmp_path / "file" / "out")


def test_a_disk_without_room_is_refused_before_anything_is_written(model, tmp_path, monkeypatch):
    source, specs, _ = model
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(OutOfBudget, match=r"are needed in .*, 1 MiB are free"):
        convert(source, specs, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_a_disk_that_fills_up_keeps_what_is_finished(model, tmp_path, monkeypatch):
    source, specs, _ = model
    real = os.fsync
    calls = []

    def full(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutOfBudget, match=r"disk is full at .*run the same command again"):
        convert(source, specs, tmp_path / "out", policy=MIXED)
    monkeypatch.undo()
    assert not (tmp_path / "out").exists()
    left = {p.name for p in (tmp_path / "out.partial").iterdir()}
    assert "shared.safetensors" in left and not any(name.endswith(".tmp") for name in left)
    assert convert(source, specs, tmp_path / "out", policy=MIXED).resumed >= 1


def test_a_disk_that_returns_other_bytes_is_noticed(model, tmp_path, monkeypatch):
    source, specs, _ = model
    real = os.posix_fadvise

    def rot(fd: int, *args: int) -> None:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
            os.pwrite(fd, b"\xa5", 200)
        real(fd, *args)

    monkeypatch.setattr(os, "posix_fadvise", rot)
    with pytest.raises(CheckpointError, match="reads back differently"):
        convert(source, specs, tmp_path / "out", policy=MIXED)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_a_bad_source_leaves_nothing_behind(tmp_path):
    tensors, specs = tiny_model()
    tensors["layers.1.experts.2.down"][3, 3] = torch.nan
    source = open_checkpoint(save_model(tmp_path / "source", tensors))
    with pytest.raises(CheckpointError, match=r"layers\.1\.experts\.2\.down: 1 of"):
        convert(source, specs, tmp_path / "out", policy=MIXED)
    with pytest.raises(CheckpointError, match="lacks 1 tensors"):
        convert(source, [*specs, vector("absent")], tmp_path / "out", policy=MIXED)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_a_packed_model_is_not_converted_again(model, tmp_path):
    source, specs, _ = model
    convert(source, specs, tmp_path / "out", policy=KEEP)
    with pytest.raises(InvalidRequest, match="is packed already"):
        convert(open_checkpoint(tmp_path / "out"), specs, tmp_path / "again")


def test_two_conversions_into_one_place_do_not_meet(model, tmp_path):
    source, specs, _ = model
    messages = []

    def second(done: int, total: int) -> None:
        if not messages:
            with pytest.raises(InvalidRequest, match=r"another conversion into .* is running") as e:
                convert(source, specs, tmp_path / "out", policy=MIXED)
            messages.append(str(e.value))

    convert(source, specs, tmp_path / "out", policy=MIXED, progress=second)
    assert messages and open_checkpoint(tmp_path / "out").names()


def test_packed_models_refuse_other_formats_and_other_models(model, tmp_path):
    source, specs, _ = model
    convert(source, specs, tmp_path / "out", policy=MIXED)
    packed = open_checkpoint(tmp_path / "out")
    assert load_weights(packed, specs, policy=MIXED)
    with pytest.raises(InvalidRequest, match=r"was converted to int4-g32.*loaded as k4"):
        load_weights(packed, specs, policy=FormatPolicy.parse("experts=k4"))
    with pytest.raises(CheckpointError, match="lacks 1 weights that the model needs: absent"):
        load_weights(packed, [*specs, vector("absent")], policy=KEEP)
    with pytest.raises(CheckpointError, match=r"norm should be vector \[63\] but is vector \[64\]"):
        load_weights(packed, [vector("norm", 63)], policy=KEEP)


def test_experts_laid_out_differently_than_kernels_read_are_refused(model, tmp_path):
    source, specs, _ = model
    convert(source, specs, tmp_path / "out", policy=MIXED)
    path = tmp_path / "out" / "moestro.json"
    manifest = json.loads(path.read_text())
    manifest["weights"]["layers.0.experts"]["parts"][1]["offset"] += 64
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="places gate, up and down elsewhere"):
        load_weights(open_checkpoint(tmp_path / "out"), specs, policy=KEEP)
