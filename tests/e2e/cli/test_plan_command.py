"""``moestro plan`` and what it needs: published shapes, described machines, JSON, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import published_shapes
from moestro.cli import main as cli

EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"
LAPTOP, WORKSTATION = (str(EXAMPLES / f"machine-{n}.yaml") for n in ("laptop", "workstation"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two published shapes with few layers, without data."""
    folder = tmp_path_factory.mktemp("shapes")
    for name, layers in (("qwen3-30b-a3b", 2), ("deepseek-v3", 4), ("gpt-oss-120b", 2)):
        config = published_shapes.CONFIGS[name] | {"num_hidden_layers": layers}
        published_shapes.write(folder / name, config)
    published_shapes.write(folder / "glm-4.5-air", published_shapes.CONFIGS["glm-4.5-air"])
    return folder


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3", "gpt-oss-120b"])
def test_a_model_without_data_is_planned(
    shapes: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    code, out, _ = run(capsys, str(shapes / name), "--machine", WORKSTATION, "--json")
    report = json.loads(out)
    assert code == 0 and report["verdict"] == "runs well"
    assert report["machine"] == {"name": "two sockets, 512 GB, 24 GB card", "measured": False}
    for tier in ("ram", "accelerator"):
        sizes = report["tiers"][tier]
        parts = ("weights", "experts", "kv", "buffers", "staging", "pinned")
        assert sizes["total"] == sum(sizes[part] for part in parts) <= sizes["budget"]
    assert sum(report["decode"]["shares"].values()) == pytest.approx(1)
    # Weights on an accelerator are said not to run yet, never silently.
    assert not report["runnable"] and "accelerator" in report["not_yet"][0]
    assert report["load_seconds"] > 0 and report["one_more"]


def test_published_sizes_are_those_of_the_models(tmp_path: Path) -> None:
    """Parameters as the models' names say: 30.5 billion, 671 without predicting layers."""
    for name, billions in (("qwen3-30b-a3b", 30.5), ("gpt-oss-120b", 116.8)):
        count = 0
        for tensor, dtype, shape in published_shapes.tensors(published_shapes.CONFIGS[name]):
            size = 1
            for n in shape:
                size *= n
            if not tensor.endswith(("_scale_inv", "_scales")):
                count += 2 * size if dtype == "U8" else size
        assert count / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_table_fits_80_columns_and_folds_below(
    shapes: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns in (80, 50):
        monkeypatch.setenv("COLUMNS", str(columns))
        code, out, _ = run(
            capsys, str(shapes / "qwen3-30b-a3b"), "--formats", "int4-g32", "--machine", LAPTOP
        )
        assert code == 0 and max(map(len, out.splitlines())) <= columns
        for word in ("accelerator", "budget", "decode", "prefill", "one more", "verdict"):
            assert word in out


def test_memory_pins_and_concurrency_are_planned_with(
    shapes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(shapes / "qwen3-30b-a3b")
    common = [model, "--machine", LAPTOP, "--json", "--formats", "int4-g32"]
    options = ["--context", "4096", "--concurrency", "3", "--accelerator-memory", "0"]
    _, out, _ = run(
        capsys, *common, *options, "--memory", "1200MiB", "--pin", "layers.0.experts.0-9=disk"
    )
    report = json.loads(out)
    assert set(report["tiers"]) == {"ram", "disk"}
    assert report["tiers"]["ram"]["budget"] == 1200 * 2**20
    assert report["kv_positions"] == 3 * 4096 and report["concurrency"] == 3
    assert {"what": "layers 0 10 experts each", "tier": "disk"} in report["where"]
    assert "convert" in report["not_yet"][0]  # it is not packed


def test_what_cannot_fit_says_what_is_missing(
    shapes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(
        capsys, str(shapes / "qwen3-30b-a3b"), "--machine", LAPTOP, "--memory", "100MiB",
        "--accelerator-memory", "0",
    )  # fmt: skip
    assert code == 0 and "does not fit" in out and "of RAM missing" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--machine", "nowhere.yaml"], "no description of a machine"),
        (["--pin", "layers.0"], "is not a pin"),
        (["--machine", LAPTOP, "--pin", "layers.77.experts=ram"], "selects nothing"),
        (["--machine", LAPTOP, "--memory", "lots"], "not a size"),
        (["--machine", LAPTOP, "--context", "999999"], "made for"),
    ],
)
def test_refusals_name_what_is_wrong(
    shapes: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, _, err = run(capsys, str(shapes / "qwen3-30b-a3b"), *arguments)
    assert code == 2 and message in err


def test_a_family_that_is_not_implemented_is_said_so(
    shapes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, str(shapes / "glm-4.5-air"), "--machine", LAPTOP)
    assert code == 5 and "glm4_moe" in err and "not implemented" in err


def test_a_machine_is_measured_the_first_time(
    shapes: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("MOESTRO_CACHE", str(tmp_path))
    asked: list[Path] = []

    def collect(path: Path, *, anew: bool) -> dict[str, object]:
        asked.append(path)
        return {}

    monkeypatch.setattr("moestro.cli._rates.collect", collect)
    code, _, err = run(capsys, str(shapes / "qwen3-30b-a3b"))
    # Nothing was kept by this stand-in, and that is said.
    assert asked == [shapes / "qwen3-30b-a3b"]
    assert code == 2 and "measuring this machine once" in err and "could not be kept" in err
