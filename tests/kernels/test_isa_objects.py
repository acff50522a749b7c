"""No instruction set leaks: symbols that the linker may share hold only baseline instructions.

An inline function compiled inside a target region is a weak symbol; the linker keeps one copy of it
for everybody, and an older CPU would meet it as an illegal instruction.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from moestro import native

ROOT = Path(__file__).resolve().parents[2]
#: VEX and EVEX encoded instructions are those that start with v and name a vector register
_VECTOR = re.compile(r"\tv[a-z0-9]+\s[^\n]*%[xyz]mm")


def tool(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@functools.cache
def disassembly(path: Path) -> dict[str, str]:
    """The instructions of each function of an object file."""
    blocks = re.split(r"\n[0-9a-f]+ <(.+)>:\n", tool("objdump", "-d", str(path)))
    return dict(zip(blocks[1::2], blocks[2::2], strict=True))


def objects_of_the_library() -> list[Path]:
    """Of every build in build/ but those with sanitizers."""
    found = ROOT.glob("build/*/CMakeFiles/moestro_native.dir/csrc/**/*.o")
    return [path for path in found if "sanitize" not in str(path.relative_to(ROOT))]


def leaks(objects: list[Path]) -> list[str]:
    """``object: symbol`` of every weak symbol with a vector instruction beyond the baseline."""
    found = []
    for path in objects:
        listed = (line.split() for line in tool("nm", str(path)).splitlines())
        weak = {fields[-1] for fields in listed if len(fields) > 1 and fields[-2] in "wWvVu"}
        for symbol, body in disassembly(path).items():
            if symbol in weak and _VECTOR.search(body):
                found.append(f"{path.name}: {symbol}")
    return found


@pytest.fixture
def binutils() -> None:
    if not (shutil.which("nm") and shutil.which("objdump")):
        pytest.skip("nm and objdump (binutils) are not installed")


def test_shared_symbols_hold_only_baseline_instructions(binutils):
    objects = objects_of_the_library()
    if not objects:
        pytest.skip("no object files of a build in build/: run make dev")
    assert leaks(objects) == []


#: what reads and writes tile registers
_TILES = re.compile(r"\t(ldtilecfg|sttilecfg|tile[a-z0-9]+|tdp[a-z0-9]+)\b")


def test_tile_instructions_are_in_the_amx_object_alone_and_released(binutils):
    objects = objects_of_the_library()
    found = {
        path: {symbol: _TILES.findall(body) for symbol, body in disassembly(path).items()}
        for path in objects
    }
    users = {path.name for path, used in found.items() if any(used.values())}
    if not any(path.name == "amx.cpp.o" for path in objects):
        pytest.skip("no build with AMX in build/: run make dev on x86-64")
    assert users == {"amx.cpp.o"}
    for path in (path for path in objects if path.name == "amx.cpp.o"):
        used = set().union(*found[path].values())
        assert used >= {
            "ldtilecfg", "tileloadd", "tilestored", "tilerelease", "tdpbsud", "tdpbf16ps"
        }  # fmt: skip
        # the table's entries, called by everybody else, leave no tile configured
        entries = {s for s in found[path] if re.search(r"amx_(\w+_tiles|peak)I", s)}
        assert len(entries) > 10
        for entry in entries - {s for s in entries if s.endswith(".cold")}:
            assert "tilerelease" in found[path][entry], entry


def instructions(name: str) -> list[tuple[str, str]]:
    """(bytes, text) of each instruction of the newest object of one instruction set."""
    objects = [path for path in objects_of_the_library() if path.name == f"{name}.cpp.o"]
    if not objects:
        pytest.skip("no object files of a build in build/: run make dev")
    newest = max(objects, key=lambda path: path.stat().st_mtime)
    lines = tool("objdump", "-d", "--wide", "--insn-width=15", str(newest)).splitlines()
    fields = (line.split("\t") for line in lines)
    return [(field[1].strip(), field[2]) for field in fields if len(field) == 3]


def test_the_bf16_object_multiplies_pairs_on_whole_registers(binutils):
    products = [text for _, text in instructions("avx512_bf16") if text.startswith("vdpbf16ps")]
    assert len(products) > 1000
    assert all("%zmm" in text for text in products)


def test_the_avx_vnni_object_is_vex_encoded(binutils):
    """Its processors have no AVX-512: an EVEX prefix (byte 62) would be an illegal instruction."""
    found = instructions("avx_vnni")
    products = [code for code, text in found if "vpdpbusd" in text]
    assert len(products) > 100
    assert all(code.startswith("c4 ") for code in products)
    assert not [text for code, text in found if code.startswith("62 ") or "%zmm" in text]


def test_avx_vnni_products_equal_scalar_ones_with_the_instruction_written_out(tmp_path):
    """The machine at hand may lack the instruction; the rest of its kernels runs on AVX2."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None or "avx2" not in native.supported_isas():
        pytest.skip("needs a C++ compiler and AVX2")
    source = Path(__file__).with_name("integer_tiles.cpp")
    common = ("-std=c++20", "-O0", "-w", "-ffp-contract=off", f"-I{ROOT / 'csrc'}")
    outputs = []
    for name, flags in (("scalar", ()), ("emulated", ("-DEMULATED", "-mavx2", "-mfma", "-mf16c"))):
        program = str(tmp_path / name)
        tool(compiler, *common, *flags, str(source), "-o", program)
        outputs.append(tool(program).splitlines())
    scalar, emulated = outputs
    integer_formats = {line.split()[0] for line in scalar}
    assert len(integer_formats) > 10 and len(scalar) == 10 * len(integer_formats)
    assert scalar == emulated


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
        disassembly.cache_clear()
        assert len(leaks([tmp_path / "leaky.o"])) == expected
