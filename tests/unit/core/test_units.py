"""Byte sizes as people write and read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.core.errors import InvalidRequest
from moestro.core.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512", 512),
        ("512B", 512),
        ("24GiB", 24 * 2**30),
        ("24 gib", 24 * 2**30),
        ("24G", 24 * 2**30),
        ("800MB", 800 * 10**6),
        ("1.5k", 1536),
        (" 2TiB ", 2 * 2**40),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "1e9", "24 gigs", "1.G", "1G 2M", "0x10"])
def test_anything_else_is_refused_by_name(text):
    with pytest.raises(InvalidRequest, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (3 * 2**40, "3 TiB")],
)
def test_sizes_are_shown(size, text):
    assert format_bytes(size) == text


@given(st.integers(0, 2**50))
def test_what_is_shown_reads_back_within_three_digits(size):
    shown = format_bytes(size)
    if "e" not in shown:
        assert abs(parse_bytes(shown) - size) <= 0.006 * size
