"""Conversion: the packed model holds what was asked, and no failure leaves anything half-done."""

import os
import signal
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import EXPERTS, MemoryCheckpoint, matrix, save_model, tiny_model

from moestro import formats
from moestro.checkpoints import open_checkpoint
from moestro.core.errors import CheckpointError
from moestro.memory.convert import convert
from moestro.memory.loader import load_weights
from moestro.memory.policy import FormatPolicy

KEEP = FormatPolicy.parse("")
MIXED = FormatPolicy.parse("experts=int4-g32,attention=int8-g32,embedding=bf16")


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def values(weights):
    """Every decoded value by key."""
    out = {}
    for key, weight in weights.items():
        if isinstance(weight, torch.Tensor):
            out[key] = weight
        elif hasattr(weight, "expert"):
            for e in range(weight.num_experts):
                for name, part in zip(("gate", "up", "down"), weight.expert(e), strict=True):
                    out[f"{key}.{e}.{name}"] = part.unpack()
        else:
            out[key] = weight.unpack()
    return out


@pytest.mark.parametrize(
    "policy", [KEEP, MIXED, FormatPolicy.parse("attention=k4,embedding=k6"), None]
)
def test_a_converted_model_loads_as_the_source_loads_with_that_policy(model, tmp_path, policy):
    source, specs, _ = model
    report = convert(source, specs, tmp_path / "out", policy=policy)
    packed = open_checkpoint(tmp_path / "out")
    loaded = values(load_weights(packed, specs, policy=KEEP))
    direct = load_weights(source, specs, policy=policy or FormatPolicy.for_conversion())
    want = values(direct)
    assert loaded.keys() == want.keys()
    assert all(torch.equal(loaded[key], want[key]) for key in want)
    assert (packed.architecture, packed.config_container) == ("tiny", "safetensors")
    assert packed.config == source.config
    packed.verify()
    assert [w.key for w in report.weights] == list(direct)


def test_the_report_has_sizes_formats_and_true_errors(model, tmp_path):
    source, specs, tensors = model
    report = convert(source, specs, tmp_path / "out", policy=MIXED)
    by_key = {weight.key: weight for weight in report.weights}
    assert report.resumed == 0 and report.out_dir == tmp_path / "out"
    assert by_key["embed"].format == "bf16" and by_key["embed"].relative_error == 0
    assert by_key["norm"].relative_error == 0 and by_key["layers.0.router"].relative_error == 0
    attention = by_key["layers.1.q"]
    original = tensors["layers.1.q"].float()
    format_ = formats.get("int8-g32")
    difference = format_.unpack(format_.pack(original), *original.shape) - original
    assert attention.relative_error == pytest.approx(float(difference.norm() / original.norm()))
    assert attention.nbytes == format_.nbytes(*original.shape)
    assert attention.source_nbytes == original.numel() * 2
    assert 0.03 < by_key["layers.0.experts"].relative_error < 0.12
    assert report.source_nbytes == sum(t.nbytes for t in tensors.values())
    recorded = open_checkpoint(tmp_path / "out").entry("layers.1.q").relative_error
    assert recorded == attention.relative_error


def test_tokenizer_files_come_along_and_other_files_do_not(model, tmp_path):
    source, specs, _ = model

    def write_tokenizer(directory: Path) -> None:
        (directory / "chat_template.jinja").write_text("{{ messages }}")

    convert(source, specs, tmp_path / "out", policy=KEEP, write_tokenizer=write_tokenizer)
    names = set(contents(tmp_path / "out"))
    assert names == {
        "moestro.json", "config.json", "tokenizer.json", "chat_template.jinja",
        "shared.safetensors", "experts-000.bin", "experts-001.bin",
    }  # fmt: skip
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"model": "tokens"}'
    assert not (tmp_path / "out.partial").exists()


def test_expert_files_are_blobs_of_whole_pages(model, tmp_path):
    source, specs, _ = model
    convert(source, specs, tmp_path / "out", policy=MIXED)
    bank = load_weights(source, specs, policy=MIXED)["layers.1.experts"]
    data = (tmp_path / "out" / "experts-001.bin").read_bytes()
    assert len(data) % 4096 == 0 and len(data) == EXPERTS * bank.layout.nbytes
    assert data == bank.buffer.numpy().tobytes()


def test_progress_reaches_the_source_size(model, tmp_path):
    source, specs, tensors = model
    calls = []
    convert(source, specs, tmp_path / "out", policy=KEEP, progress=lambda *c: calls.append(c))
    total = sum(t.nbytes for t in tensors.values())
    assert calls[0] == (0, total) and calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_gguf_metadata_and_exact_types_are_kept(tmp_path):
    raw = torch.randint(0, 255, (48 * 2 * 18,), dtype=torch.uint8).view(48, 2, 18)
    raw[:, :, :2] = torch.tensor([0x00, 0x2C], dtype=torch.uint8)  # float16 0.0625
    source = MemoryCheckpoint({"q": ("Q4_0", (48, 64), raw.reshape(-1))}, "gguf")
    source.config = {"general.architecture": "llama", "tokens": ["a", "\u2581b", ""], "eps": 1e-5}
    source.path = tmp_path / "model.gguf"
    source._infos["q"] = source.info("q").__class__(**{**source.info("q").__dict__,
                                                       "file": source.path})  # fmt: skip
    source.path.write_bytes(b"GGUF")
    convert(source, [matrix("q")], tmp_path / "out")
    packed = open_checkpoint(tmp_path / "out")
    assert packed.config_container == "gguf" and packed.config == source.config
    assert packed.entry("q").format_name == "int4-g32" and packed.entry("q").relative_error == 0


def test_importance_is_used_by_key(model, tmp_path):
    source, specs, tensors = model
    importance = {
        "layers.0.q": torch.rand(64) ** 4,
        "layers.0.experts.down": torch.rand(EXPERTS, 32) ** 4,
    }
    convert(source, specs, tmp_path / "a", policy=FormatPolicy.parse("int4-g32"))
    convert(
        source, specs, tmp_path / "b", policy=FormatPolicy.parse("int4-g32"), importance=importance
    )
    a, b = (
        values(load_weights(open_checkpoint(tmp_path / n), specs, policy=KEEP)) for n in ("a", "b")
    )
    changed = {key for key in a if not torch.equal(a[key], b[key])}
    assert changed == {"layers.0.q", *(f"layers.0.experts.{e}.down" for e in range(EXPERTS))}
    importance["layers.0.experts.1.down"] = importance.pop("layers.0.experts.down")[1]
    for key, weight in importance.items():
        original = tensors[key].float()
        errors = [((v[key] - original).square() * weight).sum() for v in (a, b)]
        assert errors[1] < errors[0]


class TestKilled:
    """A child process is killed at every write to disk in turn; the parent takes the work up."""

    @staticmethod
    def convert_in_child(source_dir: Path, specs, out: Path, kill_at: int) -> bool:
        """True if the child got to the end. It dies at its ``kill_at``-th system call that makes
        something durable or visible, before (even) or after (odd) the call.
        """
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL
            return status == 0
        count = 0

        def deadly(call):
            def wrapper(*args, **kwargs):
                nonlocal count
                count += 1
                if count * 2 == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                result = call(*args, **kwargs)
                if count * 2 + 1 == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return wrapper

        status = 1
        try:
            torch.set_num_threads(1)
            for name in ("fsync", "replace", "rename"):
                setattr(os, name, deadly(getattr(os, name)))
            convert(open_checkpoint(source_dir), specs, out, policy=MIXED)
            status = 0
        finally:
            os._exit(status)

    def test_at_every_step_then_resumed_to_the_same_bytes(self, tmp_path):
        tensors, specs = tiny_model(layers=1)
        source = open_checkpoint(save_model(tmp_path / "source", tensors))
        convert(source, specs, tmp_path / "whole", policy=MIXED)
        want = contents(tmp_path / "whole")
        finished, kill_at, resumed = False, 2, []
        while not finished:
            out = tmp_path / f"out{kill_at}"
            finished = self.convert_in_child(source.path, specs, out, kill_at)
            if out.exists():  # then it is complete
                assert contents(out) == want
            report = convert(source, specs, out, policy=MIXED)
            assert contents(out) == want
            assert not out.with_name(out.name + ".partial").exists()
            resumed.append(report.resumed)
            kill_at += 1
        assert kill_at > 30 and set(resumed) == {0, 1, 2}

    def test_in_the_middle_of_a_file(self, model, tmp_path):
        source, specs, _ = model
        child = os.fork()
        if not child:
            try:
                torch.set_num_threads(1)

                def kill(done: int, total: int) -> None:
                    if done > total * 0.8:
                        os.kill(os.getpid(), signal.SIGKILL)

                convert(source, specs, tmp_path / "out", policy=MIXED, progress=kill)
            finally:
                os._exit(1)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        partial = contents(tmp_path / "out.partial")
        assert "experts-001.bin.tmp" in partial and "moestro.json" not in partial
        with pytest.raises(CheckpointError):
            open_checkpoint(tmp_path / "out.partial")
        assert convert(source, specs, tmp_path / "out", policy=MIXED).resumed == 2
        convert(source, specs, tmp_path / "whole", policy=MIXED)
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")
