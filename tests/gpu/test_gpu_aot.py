"""Kernels compile for cards that are not here (`tools/gpu_aot.py`, `make gpu-aot` for all)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: the kernel that does the work of an op
KERNELS = {"linear": "linear", "attention": "attend"}


@pytest.mark.parametrize(
    ("target", "names", "kernels"),
    [
        ("sm_90", "int4-g32,bf16", "linear"),
        ("gfx942", "k6", "linear"),
        ("sm_120", "bf16", "attention"),
    ],
)
def test_kernels_compile(target: str, names: str, kernels: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    arguments = ["--targets", target, "--formats", names, "--kernels", kernels]
    result = subprocess.run(
        [sys.executable, str(ROOT / "tools/gpu_aot.py"), *arguments],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    head, *rows = (line.split() for line in result.stdout.splitlines())
    assert head == ["kernel", "format", "form", "target", "registers", "shared", "spilled"]
    for name in names.split(","):
        compiled = {(row[0], row[2]) for row in rows if row[1] == name and row[3] == target}
        assert compiled >= {(KERNELS[kernels], form) for form in ("few", "many")}
    for row in rows:
        registers, shared, spilled = map(int, row[4:])
        assert 0 < registers <= 512 and shared <= 64 * 1024
        assert spilled == 0, row


def test_the_check_of_a_card_says_that_there_is_none() -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/gpu_check.py")],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("no card")
