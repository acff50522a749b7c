"""Which format each weight is packed in: what the user named, else the checkpoint's own type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import get_args

from moestro import formats
from moestro.core.errors import InvalidRequest
from moestro.formats.base import Format
from moestro.memory.weights import Role

_ROLES = tuple(role for role in get_args(Role) if role != "norm")
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, kw_only=True)
class FormatPolicy:
    """Formats by role and by key. Without a match a weight keeps the checkpoint's type exactly.

    default: format of every matrix not matched below, except that an integer format leaves the
    router alone: it is small, and rounding it changes which experts run. roles: by role. patterns:
    (glob over keys, format), the last match wins, before roles. keep_quantized: ``default`` is for
    float sources only; what the checkpoint quantized already stays as it is.
    """

    default: str | None = None
    roles: Mapping[str, str] = field(default_factory=dict)
    patterns: tuple[tuple[str, str], ...] = ()
    keep_quantized: bool = False

    @staticmethod
    def parse(text: str) -> FormatPolicy:
        """``""``, one format name, or ``experts=NAME,attention=NAME,layers.0.*=NAME`` (also mixed).

        Raises InvalidRequest for an unknown role, UnsupportedFormat for an unknown format.
        """
        default: str | None = None
        roles: dict[str, str] = {}
        patterns: list[tuple[str, str]] = []
        for item in filter(None, (part.strip() for part in text.split(","))):
            selector, equals, name = (piece.strip() for piece in item.partition("="))
            if not equals:
                selector, name = "", selector
            formats.get(name)
            if not selector:
                if default is not None:
                    raise InvalidRequest(f"{text!r} names two formats for everything")
                default = name
            elif "." in selector or "*" in selector:
                patterns.append((selector, name))
            elif selector in _ROLES:
                roles[selector] = name
            else:
                raise InvalidRequest(
                    f"{selector!r} in {text!r} is not a kind of weight; those are "
                    f"{', '.join(_ROLES)}, or a pattern over keys such as layers.0.*"
                )
        return FormatPolicy(default=default, roles=roles, patterns=tuple(patterns))

    @staticmethod
    def for_conversion() -> FormatPolicy:
        """What ``convert`` does when no format is named: float matrices to the default format."""
        return FormatPolicy(default=formats.DEFAULT, keep_quantized=True)

    @property
    def is_empty(self) -> bool:
        """True if every weight keeps its type."""
        return self.default is None and not self.roles and not self.patterns

    def format_for(self, key: str, role: str, source_type: str) -> Format:
        """The format to pack a matrix in. Raises UnsupportedFormat if it names none and the source
        type has no exact one, or one that such weights cannot be packed in.
        """
        name = self.name_for(key, role, source_type)
        if name is None:
            return formats.exact_for(source_type)
        named = formats.get(name)
        if not named.quantizes and source_type not in (name, *named.exact_from):
            raise named.refuse(source_type)
        return named

    def name_for(self, key: str, role: str, source_type: str) -> str | None:
        """The format named for a matrix, or None where it keeps its type."""
        matches = [name for pattern, name in self.patterns if fnmatchcase(key, pattern)]
        if matches:
            return matches[-1]
        if role in self.roles:
            return self.roles[role]
        if self.default is None or (self.keep_quantized and source_type not in _FLOAT_TYPES):
            return None
        if role == "router" and not formats.get(self.default).is_float:
            return None
        return self.default

    def __str__(self) -> str:
        parts = [self.default or ""]
        parts += [f"{role}={name}" for role, name in self.roles.items()]
        parts += [f"{pattern}={name}" for pattern, name in self.patterns]
        text = ",".join(filter(None, parts)) or "as stored"
        return f"{text} (quantized weights as stored)" if self.keep_quantized else text
