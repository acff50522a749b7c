"""The checkers of the house rules on small bad examples, so that each of them can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from architecture import budgets, floors, layout, source, words


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def package(tmp_path):
    root = tmp_path / "src/moestro"
    for folder in ("core", "formats", "checkpoints", "engine", "train", "models"):
        write(root, f"{folder}/__init__.py", "")
    write(root, "llm.py", "")
    return root


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("core/a.py", "from moestro.formats import base"),
        ("core/a.py", "import moestro.formats.base as b"),
        ("core/a.py", "def f():\n    from moestro import formats"),
        ("core/a.py", "from ..formats import base"),
        ("core/a.py", "from .. import llm"),
        ("core/a.py", "from importlib import import_module\nimport_module('moestro.formats')"),
        ("formats/a.py", "from moestro.checkpoints import base"),
        ("engine/a.py", "import moestro.train.lora"),
        ("train/a.py", "from moestro.engine import engine"),
        ("models/a.py", "import moestro"),
        ("models/a.py", "from moestro import __version__"),
        (
            "models/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import moestro.llm",
        ),
    ],
)
def test_imports_upward_or_sideways_are_found(package, file, statement):
    path = write(package, file, statement + "\n")
    (found,) = floors.violations(package)
    assert found.startswith(str(path))


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("formats/a.py", "from moestro.core import errors\nfrom . import base\nimport torch"),
        ("formats/a.py", "from moestro.formats.base import Format"),
        ("engine/sub/a.py", "from ..engine import x\nfrom ...models import y"),
        ("cli/a.py", "import moestro\nfrom moestro.llm import LLM"),
    ],
)
def test_imports_downward_pass(package, file, statement):
    write(package, file, statement + "\n")
    assert floors.violations(package) == []


def test_a_folder_without_a_floor_is_found(package):
    write(package, "attic/a.py", "import os\n")
    assert any("attic has no floor" in line for line in floors.violations(package))


def test_long_files_are_found(tmp_path):
    write(tmp_path, "src/a.py", "x = 1\n" * 601)
    write(tmp_path, "csrc/b.cpp", "\n" * 600)
    assert budgets.long_files(tmp_path, 600) == {"src/a.py": 601}


def test_long_python_functions_are_found_and_docstrings_are_free(tmp_path):
    long = "def long():\n" + "    x = 1\n" * 59
    fine = 'def fine():\n    """One.\n' + "\n" * 40 + '    """\n' + "    x = 1\n" * 58
    write(tmp_path, "src/a.py", long + "\n\n" + fine)
    (found,) = budgets.long_functions(tmp_path)
    assert "a.py:1: long has 60 lines" in found


CPP = """
#define WRAP(x) { \\
  x }
namespace moestro {
extern "C" {
int other();
}
template <class Vec, int N = (3 > 2)>
struct Loop {
  int state[2] = {1, 2};
  explicit Loop(int n) : state{n, n} { /* { */ }
  template <class F> void run(F f) const noexcept {
    const char* brace = "{"; char c = '{'; int big = 1'000'000;
    auto body = [&](int i) {
      f(i);
    };
    for (int i = 0; i < N; ++i) {
      if (i) { body(i); }
    }
  }
};
constexpr int table[] = {1, 2, 3};
}  // namespace moestro
"""


def test_cpp_functions_are_measured():
    sizes = {name.split("(")[0].split()[-1]: size for name, _, size in budgets.cpp_functions(CPP)}
    assert sizes["run"] == 9
    assert sizes["Loop"] == 1
    assert sizes["WRAP"] == 2
    assert not any(word in str(sizes) for word in ("table", "namespace", "struct"))


def test_long_cpp_functions_are_found(tmp_path):
    body = "  x();\n" * 58
    write(tmp_path, "csrc/a.cpp", f"// A.\nvoid f(int a,\n       int b) {{\n{body}}}\n")
    write(tmp_path, "csrc/b.cpp", f"// B.\nvoid g() {{\n{body[:-7]}}}\n")
    (found,) = budgets.long_functions(tmp_path)
    assert "a.cpp:2: void f(int a, int b)" in found


BAD_WORDS = {
    "intrinsics": ("csrc/algo/a.h", "auto x = _mm256_add_ps(a, b);"),
    "format names": ("src/moestro/memory/a.py", "default = 'int4-g32'"),
    "model names": ("src/moestro/engine/a.py", "if kind == 'qwen3_moe': pass"),
    "cuda": ("src/moestro/nn/a.py", "x.to('cuda')"),
    "environment": ("src/moestro/nn/a.py", "import os\nos.environ['A']"),
    "the native library": ("csrc/core/a.cpp", 'std::printf("no");'),
    "print": ("src/moestro/nn/a.py", "print(1)"),
}


@pytest.mark.parametrize("rule", words.RULES, ids=lambda rule: rule.name)
def test_words_out_of_their_rooms_are_found(tmp_path, rule):
    (example,) = [bad for start, bad in BAD_WORDS.items() if rule.name.startswith(start)]
    path = write(tmp_path, *example)
    (found,) = rule.violations(tmp_path)
    assert found.startswith(str(path))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("src/moestro/nn/a.py", '"""As in Mixtral, int4-g32, cuda."""\nx = 1  # not print(1)\n'),
        ("csrc/algo/a.h", "// never _mm512_add_ps, printf or qwen\n/* abort\n */ int k4 = 1;\n"),
        ("csrc/simd/a.h", "__m512 x = _mm512_set1_ps(1);\n"),
        ("src/moestro/models/a.py", "name = 'qwen3_moe'\n"),
        ("src/moestro/core/env.py", "import os\nos.environ.get('A')\n"),
        ("csrc/core/a.cpp", "// A\nstd::snprintf(buffer, n, format);\n"),
    ],
)
def test_words_in_their_rooms_and_in_prose_pass(tmp_path, file, text):
    write(tmp_path, file, text)
    assert [found for rule in words.RULES for found in rule.violations(tmp_path)] == []


def test_code_keeps_line_numbers():
    text = '"""Doc\nstring."""\n\nx = "# kept"  # gone\n'
    assert source.python_code(text) == ["", "", "", 'x = "# kept"  ']
    assert source.cpp_code("a /* x\ny */ b\n") == ["a ", " b"]


def test_the_map_must_equal_the_tree(tmp_path):
    write(tmp_path, "src/moestro/core/a.py", "")
    write(tmp_path, "csrc/simd/a.h", "")
    write(
        tmp_path, "docs/ARCHITECTURE.md", "- `docs/`: pages\n- `csrc/simd/`: lanes\n- `gone/`: x\n"
    )
    found = layout.map_differences(tmp_path)
    assert [line.split()[1:4] for line in found] == [
        ["lacks", "a", "line"],
        ["names", "gone/,", "which"],
    ]


def test_missing_docstrings_are_found(tmp_path):
    write(tmp_path, "src/a.py", "x = 1\n")
    write(tmp_path, "src/b.py", '"""Owns b."""\n')
    write(tmp_path, "csrc/a.h", "#pragma once\n#include <array>\n")
    write(tmp_path, "csrc/b.h", "#pragma once\n// Owns b.\n")
    assert [Path(line.split(":")[0]).name for line in layout.missing_docstrings(tmp_path)] == [
        "a.py",
        "a.h",
    ]


@pytest.mark.parametrize("kind", ["except:", "except Exception as e:", "except BaseException:"])
def test_handlers_that_swallow_every_error_are_found(tmp_path, kind):
    handler = f"try:\n    f()\n{kind}\n    clean()\n"
    path = write(tmp_path, "src/moestro/nn/a.py", handler)
    write(tmp_path, "src/moestro/nn/b.py", handler + "    raise\n")
    write(tmp_path, "src/moestro/cli/a.py", handler)
    write(tmp_path, "src/moestro/nn/c.py", "try:\n    f()\nexcept ValueError:\n    pass\n")
    (found,) = layout.swallowing_handlers(tmp_path)
    assert found.startswith(f"{path}:3")


def test_unmirrored_tests_are_found(tmp_path):
    write(tmp_path, "src/moestro/core/a.py", "")
    write(tmp_path, "tests/unit/cores/test_a.py", "")
    write(tmp_path, "tests/e2e/test_a.py", "")
    found = "\n".join(layout.unmirrored(tmp_path))
    assert "tests/unit/cores mirrors no folder" in found
    assert "src/moestro/core has no tests" in found
    assert "same name" in found


def test_broken_links_are_found(tmp_path):
    write(tmp_path, "README.md", "[a](docs/a.md) [b](docs/b.md#x) [c](https://x.y) [d](#here)")
    write(
        tmp_path, "docs/a.md", "[up](../README.md) [gone](gone.md)\n```\n[code](not-a-link)\n```\n"
    )
    found = layout.broken_links(tmp_path)
    assert len(found) == 2
    assert "docs/b.md#x" in found[0] and "gone.md" in found[1]


def test_undocumented_commands_are_found(tmp_path):
    write(tmp_path, "docs/guide/run.md", "Type `moestro run MODEL`.")
    assert layout.undocumented_commands(tmp_path, ["run", "chat"]) == [
        "moestro chat is in no page of docs/guide"
    ]
