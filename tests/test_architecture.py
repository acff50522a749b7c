"""The rules of the house, checked on the tree itself. The checkers are in ``architecture/``."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from architecture import budgets, floors, layout, words

ROOT = Path(__file__).resolve().parent.parent


def none_of(found: list[str]) -> None:
    listing = "\n".join(line.replace(f"{ROOT}/", "") for line in found)
    if found:
        pytest.fail(f"{len(found)} against the rules:\n{listing}", pytrace=False)


def test_imports_go_down():
    none_of(floors.violations(ROOT / "src/moestro"))


def test_files_are_short():
    over = budgets.long_files(ROOT, budgets.HARD_FILE_LINES)
    none_of([f"{name} has {size} lines" for name, size in over.items()])


def test_files_near_the_limit_are_named():
    over = budgets.long_files(ROOT, budgets.SOFT_FILE_LINES)
    for name, size in over.items():
        if name not in budgets.SOFT_ALLOWED:
            warnings.warn(f"{name} has {size} lines, split it before 600", stacklevel=1)
    none_of([f"{name} is allowed without need" for name in budgets.SOFT_ALLOWED.keys() - over])


def test_functions_are_short():
    none_of(budgets.long_functions(ROOT))


@pytest.mark.parametrize("rule", words.RULES, ids=lambda rule: rule.name)
def test_words_stay_in_their_rooms(rule):
    none_of(rule.violations(ROOT))


def test_every_file_says_what_it_owns():
    none_of(layout.missing_docstrings(ROOT))


def test_no_handler_swallows_every_error():
    none_of(layout.swallowing_handlers(ROOT))


def test_tests_mirror_the_source():
    none_of(layout.unmirrored(ROOT))


def test_the_map_shows_every_folder():
    none_of(layout.map_differences(ROOT))


def test_links_in_the_docs_lead_somewhere():
    none_of(layout.broken_links(ROOT))


def test_the_support_page_is_up_to_date():
    tool = [sys.executable, str(ROOT / "tools/generate_support.py"), "--check"]
    result = subprocess.run(tool, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_command_is_in_the_guide():
    skipped = {"__init__", "main"}
    files = (ROOT / "src/moestro/cli").glob("*.py")
    commands = sorted(p.stem for p in files if p.stem not in skipped and p.stem[0] != "_")
    none_of(layout.undocumented_commands(ROOT, commands))
