"""The bytes each token stands for, worked out from a tokenizer's decoder.

Decoding is the joined bytes of the tokens, read as UTF-8 with U+FFFD for what is not. That makes
streaming exact and constant-time, which decoding whole sequences again and again is not. For ids
that spell valid UTF-8 it is the text that the ``tokenizers`` decoder gives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import Tokenizer as Backend

from moestro.core.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: one stage turns a token's text (or bytes, once they are known) into the next
_Stage = Callable[["str | bytes"], "str | bytes"]


def byte_characters() -> dict[str, int]:
    """The 256 characters byte-level BPE writes bytes as (Radford et al. 2019, GPT-2's encoder):
    printable Latin-1 stands for itself, the rest for U+0100 onwards, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _on_text(change: Callable[[str], str | bytes]) -> _Stage:
    return lambda piece: change(piece) if isinstance(piece, str) else piece


def _byte_level(text: str, table: dict[str, int] = byte_characters()) -> bytes:  # noqa: B008
    try:
        return bytes(table[character] for character in text)
    except KeyError:  # an added token, written as it is
        return text.encode()


def _byte_fallback(text: str) -> str | bytes:
    match = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(match.group(1), 16)]) if match else text


def _replace(spec: dict[str, Any]) -> _Stage:
    pattern, content = spec["pattern"], spec["content"]
    if "String" not in pattern:
        raise _unknown(spec)
    return _on_text(lambda text: text.replace(pattern["String"], content))


def _unknown(spec: Any) -> CheckpointError:
    return CheckpointError(
        f"tokenizer.json has a decoder that cannot be streamed: {json.dumps(spec)[:200]}; known "
        "are ByteLevel, ByteFallback, Metaspace, Replace of a string, Fuse and Strip at the start"
    )


class PieceTable:
    """Bytes of each token of one tokenizer, made on first use.

    Raises CheckpointError for a decoder whose text is not the join of its tokens' texts.
    """

    def __init__(self, backend: Backend, special_ids: Iterable[int]) -> None:
        self._backend = backend
        self._special = frozenset(special_ids)
        self._cache: dict[int, bytes] = {}
        #: (bytes, times) that the encoder put before a text and that decoding takes off again
        self.start_padding = (b"", 0)
        self._stages: list[_Stage] = []
        self._fused = False
        if backend.decoder is None:  # words, joined by spaces
            self._stages.append(_on_text(lambda text: f" {text}"))
            self.start_padding = (b" ", 1)
        else:
            for spec in _flatten(json.loads(backend.decoder.__getstate__())):
                self._add_stage(spec)

    def _add_stage(self, spec: dict[str, Any]) -> None:
        kind = spec["type"]
        if kind == "ByteLevel":
            self._stages.append(_on_text(_byte_level))
        elif kind == "ByteFallback":
            self._stages.append(_on_text(_byte_fallback))
        elif kind == "Replace":
            self._stages.append(_replace(spec))
        elif kind == "Metaspace":
            mark = spec["replacement"]
            self._stages.append(_on_text(lambda text: text.replace(mark, " ")))
            if spec.get("prepend_scheme", "always") != "never":
                self.start_padding = (b" ", 1)
        elif kind == "Fuse":
            self._fused = True
        elif kind == "Strip" and self._fused and not spec["stop"]:
            self.start_padding = (spec["content"].encode(), spec["start"])
        else:
            raise _unknown(spec)

    def piece(self, token_id: int, skip_special: bool) -> bytes | None:
        """The token's bytes; None for a skipped special token and for an id without a token (a
        model's vocabulary is often padded past its tokenizer's).
        """
        if skip_special and token_id in self._special:
            return None
        piece = self._cache.get(token_id)
        if piece is None:
            text = self._backend.id_to_token(token_id) if token_id >= 0 else None
            if text is None:
                return None
            piece = self._cache[token_id] = self._make(text)
        return piece

    def _make(self, text: str) -> bytes:
        piece: str | bytes = text
        for stage in self._stages:
            piece = stage(piece)
        return piece.encode() if isinstance(piece, str) else piece


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [part for inner in decoder["decoders"] for part in _flatten(inner)]
    return [decoder]
