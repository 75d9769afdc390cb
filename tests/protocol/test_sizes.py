"""Byte sizes in text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("1KiB", 1024), ("2 MiB", 2 << 20), ("1.5GiB", 3 << 29), ("1kB", 1000)]
)
def test_units(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "GiB", "1 2", "1XiB", "1e3", "nan"])
def test_nonsense_is_refused(text):
    with pytest.raises(ValueError, match="a size is"):
        parse_size(text)


@pytest.mark.parametrize(("size", "text"), [(0, "0B"), (1023, "1023B"), (1536, "1.5KiB"), (2 << 30, "2GiB")])
def test_formatting(size, text):
    assert format_size(size) == text


@given(st.integers(0, 1 << 50))
def test_a_formatted_size_reads_back_to_within_its_last_digit(size):
    back = parse_size(format_size(size))
    assert abs(back - size) <= 0.051 * max(size, 1)
