"""Size budgets: lines of a file, lines of a function."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from architecture import source

HARD_FILE_LINES = 600
SOFT_FILE_LINES = 400
FUNCTION_LINES = 60

#: files between the two limits that are better whole, with the reason
SOFT_ALLOWED: dict[str, str] = {}


def file_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def python_functions(text: str) -> list[tuple[str, int, int]]:
    """(name, first line, lines) of every function, its docstring and decorators not counted."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            first = node.body[0]
            if ast.get_docstring(node, clean=False) is not None:
                lines -= (first.end_lineno or first.lineno) - first.lineno + 1
            found.append((node.name, node.lineno, lines))
    return found


_SCOPE = re.compile(
    r"^(?:\[\[.*?\]\]\s*)?(?:(?:inline|typedef|static)\s+)*"
    r"(?:(?:namespace|class|struct|union|enum)\b|extern\s*\"\")"
)
_TEMPLATE = re.compile(r"^\s*template\s*<")


def _without_template(head: str) -> str:
    """A declaration without its leading ``template <...>`` parameter lists."""
    while _TEMPLATE.match(head):
        start = head.index("<")
        angles = parens = 0
        for i in range(start, len(head)):
            parens += {"(": 1, ")": -1}.get(head[i], 0)
            angles += {"<": 1, ">": -1}.get(head[i], 0) if parens == 0 else 0
            if angles == 0:
                head = head[i + 1 :]
                break
        else:
            return head
    return head.strip()


def _opens(head: str) -> str:
    """What a brace after ``head`` opens at namespace or class level."""
    head = re.sub(r"^\s*(?:public|private|protected)\s*:", "", head)
    head = _without_template(head.strip())
    if _SCOPE.match(head):
        return "scope"
    before = head.split("(", 1)[0]
    is_assignment = "=" in before and "operator" not in before
    return "function" if "(" in head and not is_assignment else "other"


def cpp_functions(text: str) -> list[tuple[str, int, int]]:
    """(head, first line, lines) of every C++ function or multi-line macro, by counting braces."""
    lines = source.cpp_code(text, strings=False)
    found = _cpp_macros(lines)
    stack: list[tuple[str, str, int]] = []
    head, head_line = "", 0
    for number, line in enumerate(lines, 1):
        for char in line + "\n":
            outside = all(kind == "scope" for kind, _, _ in stack)
            if char == "{":
                stack.append((_opens(head) if outside else "inner", head, head_line or number))
                head, head_line = ("", 0) if outside else (head, head_line)
            elif char == "}" and stack:
                kind, name, start = stack.pop()
                if kind == "function":
                    found.append((" ".join(name.split())[:80], start, number - start + 1))
                head, head_line = ("", 0) if kind != "inner" else (head, head_line)
            elif char == ";" and outside:
                head, head_line = "", 0
            elif outside:
                head += char
                head_line = head_line or (number if not char.isspace() else 0)
    return found


def _cpp_macros(lines: list[str]) -> list[tuple[str, int, int]]:
    """Multi-line macros; preprocessor lines are blanked in place, their braces do not count."""
    found = []
    number = 0
    while number < len(lines):
        if not lines[number].lstrip().startswith("#"):
            number += 1
            continue
        start = number
        while lines[number].rstrip().endswith("\\") and number + 1 < len(lines):
            number += 1
        found.append((lines[start].strip()[:80], start + 1, number - start + 1))
        lines[start : number + 1] = [""] * (number + 1 - start)
        number += 1
    return found


def _sources(root: Path) -> list[Path]:
    folders = ("src", "csrc", "tests", "benchmarks", "tools")
    return list(source.files(root, {".py"} | source.CPP_SUFFIXES, *folders))


def long_files(root: Path, limit: int) -> dict[str, int]:
    """Files with more lines than ``limit``."""
    sizes = {str(path.relative_to(root)): file_lines(path) for path in _sources(root)}
    return {name: size for name, size in sizes.items() if size > limit}


def long_functions(root: Path) -> list[str]:
    """Functions of FUNCTION_LINES lines or more, as ``file:line: reason``."""
    found = []
    for path in _sources(root):
        text = path.read_text(encoding="utf-8")
        functions = python_functions(text) if path.suffix == ".py" else cpp_functions(text)
        for name, line, size in functions:
            if size >= FUNCTION_LINES:
                found.append(
                    f"{path}:{line}: {name} has {size} lines, {FUNCTION_LINES - 1} is most"
                )
    return found
