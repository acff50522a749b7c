"""Typed access to what a config.json declares about quantization, written by strangers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moestro.checkpoints.files import show
from moestro.core.errors import CheckpointError, UnsupportedFormat

WAY_OUT = "open the float checkpoint it was made from, or a GGUF file of the model"
#: group sizes that kernels have, widest first; a wider one is several of these with equal scales
GROUPS = (128, 64, 32)


class Declared:
    """Typed access to a declaration; what is malformed or not read is an error naming the place."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {what}; fetch config.json again")

    def refuse(self, what: str) -> UnsupportedFormat:
        return UnsupportedFormat(f"{self.where}: {what} is not read; {WAY_OUT}")

    def first(self, *keys: str) -> Any:
        return next((self.raw[k] for k in keys if self.raw.get(k) is not None), None)

    def count(self, *keys: str) -> int:
        value = self.first(*keys)
        if type(value) is not int:
            raise self.fail(f"{keys[0]} is {show(value)}, not a number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        if value is not None and type(value) is not bool:
            raise self.fail(f"{key} is {show(value)}, not true or false")
        return default if value is None else value

    def text(self, key: str, default: str) -> str:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, str):
            raise self.fail(f"{key} is {show(value)}, not a text")
        return default if value is None else value.lower()

    def table(self, key: str) -> Mapping[str, Any]:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.fail(f"{key} is {show(value)}, not an object")
        return value or {}

    def names(self, key: str) -> list[str]:
        value = self.raw.get(key) or []
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self.fail(f"{key} is {show(value)}, not a list of names")
        return value

    def inner(self, key: str, raw: Any) -> Declared:
        if not isinstance(raw, Mapping):
            raise self.fail(f"{key} is {show(raw)}, not an object")
        return Declared(raw, f"{self.where}.{key}")

    def pattern(self, text: str) -> re.Pattern[str]:
        try:
            return re.compile(text)
        except re.error as error:
            raise self.fail(f"{show(text)} is not a regular expression ({error})") from None

    def group_size(self, value: int) -> int:
        """0 for the whole row, which is declared as -1."""
        if value == -1:
            return 0
        if value < 1 or value % GROUPS[-1]:
            raise self.refuse(f"group size {value} (kernels have multiples of {GROUPS[-1]})")
        return value

    def block(self, value: Any, key: str) -> tuple[int, int]:
        """(output channels, input channels) that share a scale."""
        if not (isinstance(value, list) and len(value) == 2 and all(type(n) is int for n in value)):
            raise self.fail(f"{key} is {show(value)}, not [rows, columns]")
        if value[0] < 1:
            raise self.refuse(f"{key} {value}")
        return value[0], self.group_size(value[1])
