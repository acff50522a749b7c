"""No instruction set leaks: symbols that the linker may share hold only baseline instructions.

An inline function compiled inside a target region is a weak symbol; the linker keeps one copy of it
for everybody, and an older CPU would meet it as an illegal instruction.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: VEX and EVEX encoded instructions are those that start with v and name a vector register
_VECTOR = re.compile(r"\tv[a-z0-9]+\s[^\n]*%[xyz]mm")


def tool(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def leaks(objects: list[Path]) -> list[str]:
    """``object: symbol`` of every weak symbol with a vector instruction beyond the baseline."""
    found = []
    for path in objects:
        listed = (line.split() for line in tool("nm", str(path)).splitlines())
        weak = {fields[-1] for fields in listed if len(fields) > 1 and fields[-2] in "wWvVu"}
        blocks = re.split(r"\n[0-9a-f]+ <(.+)>:\n", tool("objdump", "-d", str(path)))
        for symbol, body in zip(blocks[1::2], blocks[2::2], strict=True):
            if symbol in weak and _VECTOR.search(body):
                found.append(f"{path.name}: {symbol}")
    return found


@pytest.fixture
def binutils() -> None:
    if not (shutil.which("nm") and shutil.which("objdump")):
        pytest.skip("nm and objdump (binutils) are not installed")


def test_shared_symbols_hold_only_baseline_instructions(binutils):
    objects = list(ROOT.glob("build/*/CMakeFiles/moestro_native.dir/csrc/**/*.o"))
    if not objects:
        pytest.skip("no object files of a build in build/: run make dev")
    assert leaks(objects) == []


LEAKY = """
inline __attribute__((noinline)) float twice(const float* x) { return x[0] * 2.0f + x[1]; }
float use(const float* x) { return twice(x); }
"""


def test_a_leak_is_found(binutils, tmp_path):
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / "leaky.cpp"
    for header, expected in (('#pragma GCC target("avx2")\n', 1), ("", 0)):
        source.write_text(header + LEAKY)
        tool(compiler, "-O2", "-c", str(source), "-o", str(tmp_path / "leaky.o"))
        assert len(leaks([tmp_path / "leaky.o"])) == expected
