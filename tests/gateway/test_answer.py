"""What all dialects tell of a turn's use of the cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gateway.answer import cache_comment, cache_line, cache_report
from protocol.messages import Accepted, Completed


def accepted(exact: bool, outcome: Any = "hit") -> Accepted:
    return Accepted("e", "r", outcome, 7, "none", exact=exact)


def completed(exact: bool, outcome: Any = "hit") -> Completed:
    return Completed("e", "r", outcome, 7, "none", 8, 3, 0.1, 0.2, 0.3, exact=exact)


def turn(*ends: Completed, starts: tuple[Accepted, ...] = ()) -> Any:
    prompts = max(len(ends), len(starts))
    return SimpleNamespace(prompts=prompts, accepted=dict(enumerate(starts)), completed=dict(enumerate(ends)))


def test_what_is_exact_says_no_more_than_where_it_started():
    done = turn(completed(True))
    assert cache_line(done) == "hit; depth=7; reason=none"
    assert cache_report(done)["exact"] is True


@pytest.mark.parametrize("known", [{"starts": (accepted(False),)}, {"ends": (completed(False),)}])
def test_what_started_from_other_numerics_says_so_as_soon_as_it_is_known(known: dict[str, Any]):
    done = turn(*known.get("ends", ()), starts=known.get("starts", ()))
    assert cache_line(done) == "hit; depth=7; reason=none; exact=no"
    assert cache_comment(done) == b": prefixd outcome=hit; depth=7; reason=none; exact=no\n\n"


def test_of_several_prompts_one_that_is_not_exact_is_enough():
    done = turn(completed(False), completed(True, "miss"))
    assert cache_line(done) == "miss; depth=7; reason=none; exact=no"
    assert cache_report(done)["exact"] is False
