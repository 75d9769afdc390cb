"""How far two texts are the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.text_memory import common_prefix

LENGTHS = [0, 1, 8191, 8192, 8193, 16384, 20000]


@given(st.sampled_from(LENGTHS), st.sampled_from(LENGTHS), st.sampled_from(["", "x", "é", "xy" * 9000]))
def test_the_common_prefix_is_found_wherever_it_ends(length: int, shared: int, other: str):
    one = ("abc" * length)[:length]
    two = one[:shared] + other
    same = next((at for at, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]), None)
    assert (
        common_prefix(one, two) == common_prefix(two, one) == (min(len(one), len(two)) if same is None else same)
    )
