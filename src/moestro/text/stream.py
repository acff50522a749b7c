"""Text from tokens as they come: whole characters only, and stop texts across token borders."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from moestro.core.errors import InvalidRequest
from moestro.text.pieces import PieceTable


class StreamDecoder:
    """Tokens of one answer to text, piece by piece.

    All texts that ``push`` and ``finish`` return, joined, are ``Tokenizer.decode`` of all ids with
    the same options, whatever the ids. Bytes of an unfinished UTF-8 character are kept back until
    it is finished or turns out not to be one (then it is U+FFFD). Constant work per token.
    """

    def __init__(
        self, pieces: PieceTable, *, skip_special: bool = True, continuation: bool = False
    ) -> None:
        self._pieces = pieces
        self._skip_special = skip_special
        self._padding, self._padding_left = pieces.start_padding
        if continuation:
            self._padding_left = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token, often empty."""
        piece = self._pieces.piece(token_id, self._skip_special)
        if piece is None:
            return ""
        if self._padding_left:
            piece = self._without_padding(piece)
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never became whole."""
        return self._utf8.decode(b"", final=True)

    def _without_padding(self, piece: bytes) -> bytes:
        while self._padding_left and piece.startswith(self._padding):
            piece = piece[len(self._padding) :]
            self._padding_left -= 1
        if piece:
            self._padding_left = 0
        return piece


class _Prefix:
    """How much of one stop text the text so far ends with (Knuth, Morris, Pratt 1977)."""

    __slots__ = ("_fallback", "length", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = 0
        self._fallback = [0] * len(text)
        matched = 0
        for i in range(1, len(text)):
            while matched and text[i] != text[matched]:
                matched = self._fallback[matched - 1]
            matched += text[i] == text[matched]
            self._fallback[i] = matched

    def advance(self, character: str) -> bool:
        """Take one more character; whether the stop text is now complete."""
        while self.length and self.text[self.length] != character:
            self.length = self._fallback[self.length - 1]
        self.length += self.text[self.length] == character
        return self.length == len(self.text)


class StopMatcher:
    """Ends a stream of text before the first stop text that becomes complete in it.

    Only text that could still be the beginning of a stop text is held back. Where the text is cut
    does not depend on how it was cut into pieces; of stop texts that end at the same character the
    longest counts. ``matched`` is the stop text found, else None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise InvalidRequest("a stop text is empty; remove it or give it characters")
        self._prefixes = [_Prefix(stop) for stop in stops]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The part of the text so far that may go out; empty once a stop text was found."""
        if self.matched is not None:
            return ""
        if not self._prefixes:
            return text
        pending = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            complete = [prefix.text for prefix in self._prefixes if prefix.advance(character)]
            if complete:
                self.matched = max(complete, key=len)
                self._held = ""
                return pending[: end - len(self.matched)]
        held = max(prefix.length for prefix in self._prefixes)
        self._held = pending[len(pending) - held :]
        return pending[: len(pending) - held]

    def finish(self) -> str:
        """The text held back, when the stream ended without a stop text."""
        text, self._held = self._held, ""
        return text
