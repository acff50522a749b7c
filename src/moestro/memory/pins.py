"""What users pin to a tier: ``layers.0-9.experts=accelerator``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, get_args

from moestro.core.errors import InvalidRequest

Tier = Literal["accelerator", "ram", "disk"]
#: fastest first
TIERS: tuple[Tier, ...] = get_args(Tier)

_NUMBERS = re.compile(r"(\d+)(?:-(\d+))?")
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class Pin:
    """Everything that ``selector`` selects lives in ``tier``.

    A selector is made of the parts of a key, each a name, a number, a range ``0-9`` with both its
    ends, or ``*``; or it is a regular expression between slashes. It selects the keys that it
    matches and all below them: ``layers.0-9`` selects ``layers.3.experts.7`` too.
    """

    selector: str
    tier: Tier
    _pattern: re.Pattern[str] = field(repr=False, compare=False)
    _ranges: tuple[tuple[int, int], ...] = field(repr=False, compare=False)

    @staticmethod
    def parse(text: str) -> Pin:
        """``SELECTOR=TIER``. Raises InvalidRequest for anything else."""
        selector, equals, tier = (piece.strip() for piece in text.rpartition("="))
        if not equals or not selector:
            raise InvalidRequest(
                f"{text!r} is not a pin; write for example layers.0-9.experts=accelerator"
            )
        if tier not in TIERS:
            raise InvalidRequest(
                f"{tier!r} in {text!r} is not a tier; those are {', '.join(TIERS)}"
            )
        expression, ranges = _compile(selector, text)
        try:
            pattern = re.compile(expression)
        except re.error as error:
            raise InvalidRequest(f"{selector} is not a regular expression: {error}") from error
        return Pin(selector=selector, tier=tier, _pattern=pattern, _ranges=ranges)

    def selects(self, key: str) -> bool:
        """True for the keys that are matched, and for those below them."""
        match = self._pattern.match(key)
        if match is None:
            return False
        numbers = match.groups()[: len(self._ranges)]
        return all(
            first <= int(number) <= last
            for number, (first, last) in zip(numbers, self._ranges, strict=True)
        )

    def __str__(self) -> str:
        return f"{self.selector}={self.tier}"


def _compile(selector: str, text: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The expression that a key must begin with, and the ranges of the numbers it captures."""
    end = r"(?=\.|$)"
    if len(selector) > 1 and selector.startswith("/") and selector.endswith("/"):
        return f"(?:{selector[1:-1]}){end}", ()
    parts, ranges = [], []
    for part in selector.split("."):
        if numbers := _NUMBERS.fullmatch(part):
            first, last = int(numbers[1]), int(numbers[2] or numbers[1])
            if first > last:
                raise InvalidRequest(f"the range {part} in {text!r} is empty; write {last}-{first}")
            ranges.append((first, last))
            parts.append(r"(\d+)")
        elif part == "*":
            parts.append(r"[^.]+")
        elif _NAME.fullmatch(part):
            parts.append(part)
        else:
            raise InvalidRequest(
                f"{part!r} in {text!r} selects nothing; between dots stand a name, a number, a "
                "range such as 0-9, or *"
            )
    return r"\.".join(parts) + end, tuple(ranges)
