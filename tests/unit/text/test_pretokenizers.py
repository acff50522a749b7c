"""How each family of vocabularies cuts text into words."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, pre_tokenizers

from moestro.text import pretokenizers
from moestro.text.pieces import byte_characters

SPLITS = {
    "gpt-2": ("I'm 1234 we'LL  ok\n\n", ["I", "'m", " 1234", " we", "'", "LL", " ", " ok", "\n\n"]),
    "smollm": ("a 12½", ["a", " ", "1", "2", "½"]),
    "llama-bpe": ("We'LL 12345!\n\nok", ["We", "'LL", " ", "123", "45", "!\n\n", "ok"]),
    "qwen2": ("We'LL 123", ["We", "'LL", " ", "1", "2", "3"]),
    "qwen35": ("हिन्दी १", ["हिन्दी", " ", "१"]),
    "deepseek-llm": ("Wörter 12, 漢字", ["W", "ö", "rter", " ", "1", "2", ",", " ", "漢字"]),
    "deepseek-coder": ("x_1 (y)", ["x", "_", "1", " (", "y", ")"]),
    "deepseek-v3": ("x_abc 12345 漢字かな", ["x", "_abc", " ", "123", "45", " ", "漢字かな"]),
    "tekken": ("camelCase HTTPServer 12", ["camel", "Case", " HTTPServer", " ", "1", "2"]),
    "gpt-4o": ("camelCase's 1234", ["camel", "Case's", " ", "123", "4"]),
    "kimi-k2": ("漢字kanji We'll", ["漢字", "kanji", " We'll"]),
    "bailingmoe": ("a\n\nb 12", ["a", "\n\n", "b", " ", "1", "2"]),
    "seed-coder": ("a;\n12", ["a", ";", "\n", "1", "2"]),
    "glm4": ("We'll 1234", ["We", "'ll", " ", "123", "4"]),
    "falcon": ("a==b 1234", ["a", "==", "b", " ", "123", "4"]),
    "default": ("a==b 1234", ["a", "==", "b", " ", "123", "4"]),
    "dbrx": ("We'll 1234", ["We", "'ll", " ", "123", "4"]),
}


def split(pre: str, text: str) -> list[str]:
    table = byte_characters()
    pieces = pretokenizers.get(pre).build().pre_tokenize_str(text)
    return [bytes(table[c] for c in piece).decode() for piece, _ in pieces]


def test_bytes_are_written_as_the_tokenizers_library_writes_them():
    assert set(pre_tokenizers.ByteLevel.alphabet()) == byte_characters().keys()
    for character, byte in byte_characters().items():
        assert decoders.ByteLevel().decode([character]) == bytes([byte]).decode("utf-8", "replace")


@pytest.mark.parametrize("pre", SPLITS)
def test_words_are_cut_as_the_family_cuts_them(pre):
    text, pieces = SPLITS[pre]
    assert split(pre, text) == pieces


@pytest.mark.parametrize("pre", pretokenizers.names())
@settings(max_examples=15, deadline=None)
@given(text=st.text(max_size=30))
def test_no_way_of_cutting_loses_anything(pre, text):
    assert "".join(split(pre, text)) == text
