"""Streams of tokens: no character is split, and the pieces join to the whole for any ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from vocabularies import SPACE, StandIn, byte_level_backend, sentencepiece_metadata

from moestro.core.errors import CheckpointError, InvalidRequest
from moestro.text import StopMatcher, Tokenizer, load_tokenizer

PIECES = {SPACE: -1.0, "a": -2.0, "é": -3.0, f"{SPACE}a": -4.0, f"{SPACE}{SPACE}": -5.0}
BYTE_LEVEL = Tokenizer(byte_level_backend())
SENTENCEPIECE = load_tokenizer(
    StandIn(path=Path("x.gguf"), config=sentencepiece_metadata(PIECES))
)  # fmt: skip
TOKENIZERS = {"byte level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE}

ids_of_any_kind = st.lists(st.integers(-1, 300), max_size=60)


def pushes(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    stream = tokenizer.stream(**options)
    return [*(stream.push(i) for i in ids), stream.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(ids=ids_of_any_kind, skip=st.booleans(), goes_on=st.booleans())
def test_a_stream_joins_to_the_bytes_of_its_tokens(name, ids, skip, goes_on):
    tokenizer = TOKENIZERS[name]
    shown = [i for i in ids if not (skip and i in tokenizer.special_ids)]
    raw = b"".join(tokenizer.token_bytes(i) for i in shown)
    if name == "sentencepiece" and not goes_on:
        raw = raw.removeprefix(b" ")
    whole = raw.decode("utf-8", "replace")
    options = {"skip_special": skip, "continuation": goes_on}
    assert "".join(pushes(tokenizer, ids, **options)) == whole
    assert tokenizer.decode(ids, **options) == whole


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 261), max_size=40), skip=st.booleans())
def test_byte_level_text_is_that_of_the_tokenizers_library(ids, skip):
    theirs = byte_level_backend().decode(ids, skip_special_tokens=skip)
    assert BYTE_LEVEL.decode(ids, skip_special=skip) == theirs


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=30))
@example("👩‍👩‍👧 naïve\r\n\t日本語")
@example("  two spaces")
@example("�")
def test_no_piece_ends_within_a_character(text):
    for tokenizer in TOKENIZERS.values():
        ids = tokenizer.encode(text)
        parts = pushes(tokenizer, ids)
        assert "".join(parts) == text
        # Each part is whole characters: none shows the replacement of half a character.
        assert sum(part.count("�") for part in parts) == text.count("�")


def test_bytes_that_never_become_a_character_are_replaced_once_that_is_certain():
    euro = BYTE_LEVEL.encode("€")
    assert pushes(BYTE_LEVEL, euro) == ["", "", "€", ""]
    assert pushes(BYTE_LEVEL, euro[:2]) == ["", "", "�"]
    assert pushes(BYTE_LEVEL, [*euro[:2], *BYTE_LEVEL.encode("x")]) == ["", "", "�x", ""]


def test_the_space_before_a_sentencepiece_text_is_dropped_at_its_start_alone():
    (a,) = SENTENCEPIECE.encode("a")
    assert pushes(SENTENCEPIECE, [a, a]) == ["a", " a", ""]
    assert pushes(SENTENCEPIECE, [a, a], continuation=True) == [" a", " a", ""]
    assert pushes(SENTENCEPIECE, [1, a, a]) == ["", "a", " a", ""]
    assert SENTENCEPIECE.decode(SENTENCEPIECE.encode("  a")) == "  a"


def test_ids_without_a_token_are_silent():
    assert BYTE_LEVEL.decode([10**6, -5]) == ""
    assert BYTE_LEVEL.token_bytes(10**6) == b""


def test_a_long_stream_does_not_slow_down():
    # Decoding from the start each time would be 20,000 times 20,000 tokens, which never ends.
    ids = BYTE_LEVEL.encode("é") * 10_000
    assert "".join(pushes(BYTE_LEVEL, ids)) == "é" * 10_000


def test_words_without_a_decoder_are_joined_by_spaces():
    backend = Backend(models.WordLevel({"one": 0, "two": 1, "[UNK]": 2}, unk_token="[UNK]"))
    assert Tokenizer(backend).decode([0, 1, 0]) == "one two one" == backend.decode([0, 1, 0])


def test_metaspace_is_space():
    backend = Backend(models.WordLevel({"▁one": 0, "▁two": 1, "s": 2}, unk_token="s"))
    backend.decoder = decoders.Metaspace()
    assert Tokenizer(backend).decode([0, 1, 2]) == "one twos" == backend.decode([0, 1, 2])


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.CTC(),
        decoders.Strip(" ", 1, 0),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ],
)
def test_a_decoder_that_is_no_join_of_tokens_is_refused(decoder):
    backend = Backend(models.WordLevel({"one": 0}, unk_token="one"))
    backend.decoder = decoder
    with pytest.raises(CheckpointError, match="cannot be streamed"):
        Tokenizer(backend)


# --- stop texts ---------------------------------------------------------------------------------


def slow_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Reads character by character; ends at the first that completes a stop text."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=400, deadline=None)
@given(
    parts=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
)
@example(parts=["aab", "aa", "b"], stops=["aabaab"])
@example(parts=["ab", "aba", "bb"], stops=["ababb"])
def test_stop_texts_end_the_stream_wherever_it_is_cut(parts, stops):
    matcher = StopMatcher(stops)
    sent = "".join(matcher.push(part) for part in parts) + matcher.finish()
    assert (sent, matcher.matched) == slow_stop("".join(parts), stops)


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
)
def test_only_what_may_become_a_stop_text_is_held_back(parts, stops):
    matcher, seen, sent = StopMatcher(stops), "", ""
    for part in parts:
        seen, sent = seen + part, sent + matcher.push(part)
        if matcher.matched is not None:
            break
        held = seen[len(sent) :]
        assert seen == sent + held
        assert not held or any(stop.startswith(held) for stop in stops)


def test_nothing_comes_after_a_stop_text():
    matcher = StopMatcher(["STOP"])
    assert [matcher.push("one S"), matcher.push("TOP two"), matcher.push("three")] == [
        "one ",
        "",
        "",
    ]
    assert matcher.finish() == ""
    assert matcher.matched == "STOP"


def test_without_stop_texts_everything_passes():
    matcher = StopMatcher([])
    assert matcher.push("abc") == "abc"
    assert matcher.finish() == ""


def test_an_empty_stop_text_is_refused():
    with pytest.raises(InvalidRequest, match="empty"):
        StopMatcher(["a", ""])
