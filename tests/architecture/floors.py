"""The order of floors: a file imports only from floors below its own, or from its own folder."""

from __future__ import annotations

import ast
from pathlib import Path

from architecture import source

PACKAGE = "moestro"

#: unit (top-level folder or file of the package) -> floor
FLOORS = {
    "core": 0,
    "_core": 1,  # the extension module; it knows nothing of Python code
    "ops": 1,
    "formats": 2,
    "checkpoints": 2,
    "text": 2,
    "machine": 2,
    "native": 2,
    "devices": 3,
    "memory": 4,
    "nn": 5,
    "models": 6,
    "engine": 7,
    "train": 7,
    "server": 8,
    "integrations": 8,
    "llm": 9,
    "__init__": 10,
    "cli": 11,
    "__main__": 12,
}


def imported_modules(path: Path, package_root: Path) -> list[tuple[int, str]]:
    """(line, absolute module name) of every import in a file, lazy and relative ones too."""
    parts = path.relative_to(package_root.parent).with_suffix("").parts
    package = parts[:-1]
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.extend((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package[: len(package) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            found.extend((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _is_import_module(node):
            argument = node.args[0]
            assert isinstance(argument, ast.Constant)
            found.append((node.lineno, str(argument.value)))
    return found


def _is_import_module(node: ast.Call) -> bool:
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return (
        name in {"import_module", "__import__"}
        and bool(node.args)
        and isinstance(node.args[0], ast.Constant)
    )


def unit_of(module: str, package_root: Path) -> str | None:
    """The unit a dotted module name belongs to; None for modules of other packages."""
    head, *rest = module.split(".")
    if head != package_root.name:
        return None
    if rest and (rest[0] in FLOORS or _exists(package_root / rest[0])):
        return rest[0]
    return "__init__"


def _exists(stem: Path) -> bool:
    return stem.is_dir() or stem.with_suffix(".py").is_file()


def violations(package_root: Path) -> list[str]:
    """Every import that goes up or sideways, as ``file:line: reason``."""
    found: list[str] = []
    for path in source.files(package_root, {".py"}, "."):
        own = path.relative_to(package_root).parts[0].removesuffix(".py")
        if own not in FLOORS:
            found.append(f"{path}: {own} has no floor; give it one in tests/architecture/floors.py")
            continue
        for line, module in imported_modules(path, package_root):
            target = unit_of(module, package_root)
            if target is None or target == own:
                continue
            if target not in FLOORS:
                found.append(f"{path}:{line}: imports {module}, which has no floor")
            elif FLOORS[target] >= FLOORS[own]:
                found.append(
                    f"{path}:{line}: {own} (floor {FLOORS[own]}) imports {module} "
                    f"(floor {FLOORS[target]}); only lower floors or the own folder are allowed"
                )
    return found
