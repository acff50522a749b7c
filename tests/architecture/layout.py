"""The shape of the tree: test folders, the folder map, docstrings, links, documented commands."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from architecture import source

MAPPED = ("src/moestro", "csrc", "tests", "benchmarks", "docs", "tools")
_MAP_LINE = re.compile(r"^- `([^`]+)/`: \S.*$")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def folders_with_files(root: Path, *tops: str) -> set[str]:
    """Folders below the tops that hold a file of their own (caches and hidden ones skipped).

    What lies below tests/unit mirrors the source and counts as that one folder.
    """
    found = set()
    for top in tops:
        for path in (root / top).rglob("*"):
            parts = path.relative_to(root).parts
            hidden = any(part.startswith(".") or part in source.SKIPPED for part in parts)
            if path.is_file() and not hidden and path.suffix not in {".pyc", ".so"}:
                found.add("/".join(parts[:2] if parts[:2] == ("tests", "unit") else parts[:-1]))
    return found


def mapped_folders(text: str) -> list[str]:
    """Folders named by the map lines (``- `folder/`: what it owns``) of docs/ARCHITECTURE.md."""
    return [m.group(1) for line in text.splitlines() if (m := _MAP_LINE.match(line))]


def map_differences(root: Path) -> list[str]:
    """Where the folder map and the tree differ."""
    named = mapped_folders((root / "docs/ARCHITECTURE.md").read_text(encoding="utf-8"))
    real = folders_with_files(root, *MAPPED)
    found = [f"docs/ARCHITECTURE.md lacks a line for {f}/" for f in sorted(real - set(named))]
    found += [f"docs/ARCHITECTURE.md names {f}/, which is not there" for f in set(named) - real]
    found += [f"docs/ARCHITECTURE.md names {f}/ twice" for f in set(named) if named.count(f) > 1]
    return found


def missing_docstrings(root: Path) -> list[str]:
    """Python files without a module docstring, native ones without a first comment."""
    found = []
    for path in source.files(root, {".py"}, "src", "benchmarks", "tools", "tests"):
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))):
            found.append(f"{path}: no module docstring saying what it owns")
    for path in source.files(root, source.CPP_SUFFIXES, "csrc"):
        if path.suffix == ".cpp" and path.with_suffix(".h").is_file():
            continue  # the header says it
        text = path.read_text(encoding="utf-8").removeprefix("#pragma once").lstrip()
        if not text.startswith(("//", "/*")):
            found.append(f"{path}: no first comment saying what it owns")
    return found


def swallowing_handlers(root: Path) -> list[str]:
    """Handlers of every exception that do not raise again, outside the process edges."""
    found = []
    for path in source.files(root, {".py"}, "src"):
        if path.relative_to(root).parts[2] in {"cli", "server"}:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or getattr(node.type, "id", "") in {
                "Exception",
                "BaseException",
            }
            if broad and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
                found.append(f"{path}:{node.lineno}: a handler of every exception swallows it")
    return found


def unmirrored(root: Path) -> list[str]:
    """Test folders without a source folder, source folders without tests, repeated test names."""
    found = []
    package, unit = root / "src/moestro", root / "tests/unit"
    for folder in sorted(p for p in unit.rglob("*") if p.is_dir() and p.name not in source.SKIPPED):
        relative = folder.relative_to(unit)
        if not (package / relative).is_dir():
            found.append(f"tests/unit/{relative} mirrors no folder of src/moestro")
    for folder in sorted(p for p in package.iterdir() if p.is_dir()):
        has_code = any(p.stem != "__init__" for p in folder.rglob("*.py"))
        if has_code and not list((unit / folder.name).rglob("test_*.py")):
            found.append(f"src/moestro/{folder.name} has no tests in tests/unit/{folder.name}")
    seen: dict[str, Path] = {}
    for path in source.files(root, {".py"}, "tests"):
        if path.name.startswith("test_") and path.name in seen:
            found.append(f"{path} has the same name as {seen[path.name]}")
        seen.setdefault(path.name, path)
    return found


def broken_links(root: Path) -> list[str]:
    """Relative links in Markdown files that lead nowhere."""
    pages = [*root.glob("*.md"), *source.files(root, {".md"}, "docs", "benchmarks")]
    found = []
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in _LINK.findall(text):
            if re.match(r"[a-z]+:|#", target):
                continue
            if not (page.parent / target.split("#")[0]).exists():
                found.append(f"{page}: link to {target} leads nowhere")
    return found


def undocumented_commands(root: Path, commands: list[str]) -> list[str]:
    """Commands that no page of the guide shows as ``moestro NAME``."""
    guide = "\n".join(
        p.read_text(encoding="utf-8") for p in source.files(root, {".md"}, "docs/guide")
    )
    return [
        f"moestro {name} is in no page of docs/guide"
        for name in commands
        if not re.search(rf"\bmoestro {re.escape(name)}\b", guide)
    ]
