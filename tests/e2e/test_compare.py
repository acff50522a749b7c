"""The comparison with other engines: both sides read the same, what is missing is named.

The engines themselves are not needed here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import model_logits
import numpy as np
import pytest
import torch

from bench_engine import Session, bytes_per_token
from bench_moe import Shape
from comparing import operators, tables, weights, whole_models
from comparing.report import Report
from moestro import formats
from peers.llama_cpp import LlamaCpp
from peers.worker import PeerFailed, Worker

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
SHAPE = Shape(hidden_size=256, intermediate_size=128, num_experts=16, top_k=4)


def script(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / name), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def case(name: str, folder: Path) -> weights.Case:
    return weights.make_case(name, SHAPE, folder, LlamaCpp(folder))


def rows_of(name: str) -> dict[str, tuple[int, int]]:
    narrow, wide = SHAPE.intermediate_size, SHAPE.hidden_size
    return {"gate": (narrow, wide), "up": (narrow, wide), "down": (wide, narrow)}


@pytest.mark.parametrize("name", ["BF16", "RAWINT4", "MXFP4", "FP8"])
def test_we_read_the_values_of_the_shared_codes(name: str, tmp_path: Path) -> None:
    made = case(name, tmp_path)
    packed = formats.get(made.kind.format)
    for part, (rows, cols) in rows_of(name).items():
        encoded = made.parts[part]
        assert encoded.values is not None
        for data, values in zip(encoded.packed, encoded.values, strict=True):
            assert torch.equal(packed.unpack(data, rows, cols), values)


def decoded_for_kt(name: str, folder: Path, part: str, rows: int, cols: int) -> torch.Tensor:
    """The first expert of the file that kt-kernel reads, decoded as its documentation says."""
    raw = np.fromfile(folder / f"{part}.kt", np.uint8)
    if name == "BF16":
        return torch.from_numpy(raw[: rows * cols * 2].copy()).view(torch.bfloat16).float()
    scale_bytes = np.fromfile(folder / f"{part}.kt_scales", np.uint8)
    if name == "FP8":
        codes = torch.from_numpy(raw[: rows * cols].copy()).view(torch.float8_e4m3fn).float()
        scales = torch.from_numpy(scale_bytes.view(np.float32))[: rows * cols // 128 // 128]
        spread = scales.view(rows // 128, cols // 128)
        spread = spread.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return codes * spread.reshape(-1)
    nibbles = torch.from_numpy(raw[: rows * cols // 2].copy())
    codes = torch.stack([nibbles & 15, nibbles >> 4], dim=-1).reshape(-1).long()
    table = torch.arange(16.0) - 8
    if name == "MXFP4":
        positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        table = torch.cat([positive, -positive])
    scales = torch.from_numpy(scale_bytes).view(torch.bfloat16).float()
    return table[codes] * scales[: rows * cols // 32].repeat_interleave(32)


@pytest.mark.parametrize("name", ["BF16", "RAWINT4", "MXFP4", "FP8"])
def test_the_peer_reads_the_values_of_the_shared_codes(name: str, tmp_path: Path) -> None:
    made = case(name, tmp_path)
    for part, (rows, cols) in rows_of(name).items():
        values = made.parts[part].values
        assert values is not None
        found = decoded_for_kt(name, tmp_path, part, rows, cols)
        assert torch.equal(found, values[0].reshape(-1))


def test_our_operator_computes_what_the_reference_says(tmp_path: Path) -> None:
    made = case("BF16", tmp_path)
    ours = operators.OurOperator(made, layers=2)
    x = torch.randn(3, SHAPE.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.tensor([[0, 3, 15, 8], [1, 2, 4, 5], [15, 14, 13, 12]], dtype=torch.int32)
    chosen = torch.full((3, SHAPE.top_k), 0.25)
    want = operators.reference(made, "source", x.float(), ids, chosen)
    found = ours.check(x.float(), ids, chosen)
    assert float((found - want).norm() / want.norm()) < 0.01
    assert len(ours.run(np.tile(ids.numpy(), (5, 2, 1, 1)))) == 5


def test_our_engine_runs_the_synthetic_file(tmp_path: Path) -> None:
    done = script(
        "make_gguf.py", str(tmp_path), "--shape", "tiny", "--layers", "2", "--types", "BF16"
    )
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    ids = torch.randint(300, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    exact = model_logits.sequence_logits(model_logits.load(path, device="reference"), ids)
    found = model_logits.sequence_logits(model_logits.load(path, device="cpu"), ids)
    assert exact.std() > 0.05
    assert float((found - exact).norm() / exact.norm()) < 0.05

    class Exact:
        """In the place of a peer."""

        def logits(self, ids: list[int]) -> list[float]:
            model = model_logits.load(path, device="reference")
            return model_logits.sequence_logits(model, ids)[-1].tolist()

    session = Session(path, threads=1, context=128)
    assert whole_models.check(session, Exact()) < 0.05
    assert session.prefill(16) > 0
    assert session.decode(8, 4) > 0
    # two layers, each: attention, router (float32), 2 of 8 experts; and the head
    attention = 2 * 256 * (4 * 64 + 2 * 64 + 2 * 64 + 4 * 64)
    per_layer = attention + 4 * 8 * 256 + 2 * 2 * 3 * 256 * 256
    head = 2 * 256 * 304  # rows come in sixteens
    router_padding = 4 * 8 * 256
    assert bytes_per_token(path).weights == 2 * (per_layer + router_padding) + head


def test_quantized_files_need_the_quantizer(tmp_path: Path) -> None:
    words = ["--shape", "tiny", "--types", "Q4_0", "--cache", str(tmp_path / "none")]
    done = script("make_gguf.py", str(tmp_path), *words)
    assert done.returncode == 1
    assert "python benchmarks/setup_peers.py llama.cpp" in done.stderr


def test_a_missing_peer_is_an_error_unless_it_may_be_skipped(tmp_path: Path) -> None:
    words = ["--peers", "kt-kernel,llama.cpp", "--cache", str(tmp_path), "--threads", "1"]
    done = script("compare.py", *words)
    assert done.returncode == 1
    assert f"python benchmarks/setup_peers.py kt-kernel --cache {tmp_path}" in done.stderr
    done = script("compare.py", *words, "--skip-missing")
    assert done.returncode == 0
    assert "SKIPPED: kt-kernel" in done.stderr
    assert "SKIPPED: llama.cpp" in done.stderr


def test_a_worker_answers_and_stands_still_between_requests(tmp_path: Path) -> None:
    code = "print('{\"pid\": %d}' % __import__('os').getpid(), flush=True)\n"
    code += 'while True: print(\'{"got": "%s"}\' % input(), flush=True)'
    command = [sys.executable, "-c", code]
    with Worker(command, environment={}, log=tmp_path / "log") as worker:
        stat = Path(f"/proc/{worker.info['pid']}/stat")
        assert stat.read_text().split()[2] == "T"
        assert worker.ask("first") == {"got": "first"}
        assert worker.ask("second") == {"got": "second"}
        assert stat.read_text().split()[2] == "T"
    assert not stat.exists()


def test_a_worker_that_fails_is_quoted(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such method')"]
    with pytest.raises(PeerFailed, match="no such method"):
        Worker(command, environment={}, log=tmp_path / "log")


def report(facts: dict[str, object], rows: list[dict[str, object]]) -> Report:
    return Report(peer="x", part="operator", keys=("kind", "tokens"), facts=facts, rows=rows)


def test_pieces_of_a_comparison_meet_in_one_file(tmp_path: Path) -> None:
    facts: dict[str, object] = {"threads": 2, "moestro": "1"}
    rows = [{"kind": "a", "tokens": 1, "us": 1.0}, {"kind": "a", "tokens": 4, "us": 2.0}]
    report(facts, rows).save(tmp_path, {})
    said = report(facts, [{"kind": "a", "tokens": 4, "us": 3.0}]).save(tmp_path, {})
    assert "1 rows written, 1 kept" in said
    text = (tmp_path / "compare-operator-x-t2.json").read_text()
    assert '"us": 1.0' in text and '"us": 3.0' in text and '"us": 2.0' not in text
    other = report(facts | {"moestro": "2"}, [{"kind": "b", "tokens": 1, "us": 4.0}])
    assert "0 kept" in other.save(tmp_path, {})


#: what plot.py writes into the page
PLACES = ("moe", "compare")


def test_results_become_tables_in_the_page(tmp_path: Path) -> None:
    errors = {"source": 0.1, "decoded": 0.01}
    shares = {"ours_of_read": 0.9, "peer_of_read": 0.5, "ratio_min": 1.5, "ratio_max": 1.7}
    times = {"ours_us": 500.0, "peer_us": 800.0, "ratio": 1.6}
    row = {"kind": "a", "tokens": 4, "format": "f", "peak": "dot", "ours_of_peak": 0.2}
    row |= {"ours_error": errors, "peer_error": errors, "peer_of_peak": 0.1} | shares | times
    facts: dict[str, object] = {"threads": 1, "cpu": "c", "isa": "i", "shape": "s"}
    report(facts | {"moestro": "1", "peer": "x 2"}, [row]).save(tmp_path, {})
    moe_row = {"tokens": 4, "frac_of_read_bw": 0.9, "frac_of_dot_peak": 0.2}
    content = {
        "shape": "s",
        "moestro": "1",
        "limits": facts | {"read_gb_s": 5.0, "read_gb_s_min": 4.0, "read_gb_s_max": 6.0},
        "formats": {"f": [moe_row | {"frac_of_bf16_peak": None}]},
    }
    (tmp_path / "moe-s-t1.json").write_text(json.dumps(content))
    places = [f"{tables.BEGIN.format(part)}\nold\n{tables.END}\n" for part in PLACES]
    page = tmp_path / "page.md"
    page.write_text(f"before\n{'between'.join(places)}after\n")
    tables.write(page, tmp_path, tmp_path / "images")
    once = page.read_text()
    assert "| a | `f` | **1.60×** 500 µs (90% of read) | 1.0e-02, 1.0e-02 |" in once
    assert "| `f` | **90% of read**, 20% of dot |" in once and "between" in once
    assert once.startswith("before\n") and once.endswith("after\n") and "old" not in once
    tables.write(page, tmp_path, tmp_path / "images")
    assert page.read_text() == once


def test_the_page_has_a_place_for_the_tables() -> None:
    text = (BENCHMARKS.parent / "docs" / "BENCHMARKS.md").read_text()
    assert [text.count(tables.BEGIN.format(part)) for part in PLACES] == [1, 1]
    assert text.count(tables.END) == 2
