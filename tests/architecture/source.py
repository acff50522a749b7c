"""Reading source files for the house rules: which files there are, and their code without prose."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

CPP_SUFFIXES = {".cpp", ".cc", ".h", ".hpp", ".def", ".inc"}
SKIPPED = {"__pycache__", "node_modules"}


def files(root: Path, suffixes: set[str], *folders: str) -> Iterator[Path]:
    """Files below ``root``/each folder with one of the suffixes, sorted; hidden folders skipped."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            parts = path.relative_to(root).parts
            hidden = any(part.startswith(".") or part in SKIPPED for part in parts)
            if not hidden and path.is_file() and path.suffix in suffixes:
                yield path


def docstring_lines(tree: ast.Module) -> set[int]:
    """Line numbers that belong to a docstring of the module, a class or a function."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def python_code(text: str) -> list[str]:
    """The lines of a Python file with comments and docstrings blanked."""
    lines = text.splitlines()
    for number in docstring_lines(ast.parse(text)):
        lines[number - 1] = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return lines


_CPP_PROSE = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'", re.DOTALL
)


def cpp_code(text: str, *, strings: bool = True) -> list[str]:
    """The lines of a C++ file with comments blanked, and string contents too if not ``strings``."""

    def blank(match: re.Match[str]) -> str:
        found = match.group()
        if found[0] in "\"'":
            return found if strings else found[0] * 2
        return "\n" * found.count("\n")

    return _CPP_PROSE.sub(blank, text).splitlines()


def code(path: Path) -> list[str]:
    """The lines of a source file without comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    return python_code(text) if path.suffix == ".py" else cpp_code(text)
