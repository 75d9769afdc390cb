"""How the suite shares what is costly: compiled kernels, and tests of one daemon where several processes run tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from worker.main import kernel_cache

# Before numba is imported. What a daemon has compiled is not compiled again in a process of tests, nor the reverse.
os.environ.setdefault("NUMBA_CACHE_DIR", str(kernel_cache()))

TESTS = Path(__file__).parent / "tests"
# Daemons that live as long as the session, by the fixtures that start them: the first that a test has names its group.
_DAEMONS = {
    "_real": "embedded",
    "_packed": "embedded",
    "real_reference": "embedded",
    "_verifying": "verifying",
    "_strict": "strict",
    "_plain": "plain",
    "_services": "services",
}
_WHOLE_ROOMS = ("gateway", "cachectl", "protocol")  # whose tests are too short to be handed out one by one


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n`, tests of a group run in one process, one after the other; groups of many are begun first."""
    for item in items:
        if group := _group(item):
            item.add_marker(pytest.mark.xdist_group(group))


def _group(item: pytest.Item) -> str:
    """Empty where a test may run anywhere."""
    room = item.path.relative_to(TESTS).parts[0]
    if room in _WHOLE_ROOMS:
        return room
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if room == "worker":  # some modules make a model and its cold answers for several tests
        return f"{item.path.stem} {params['worker']}" if "worker" in params else ""
    names = [name for fixture, name in _DAEMONS.items() if fixture in getattr(item, "fixturenames", ())]
    group = names[0] if names else item.path.stem
    return f"{group} {params.get('family', 'llama')}" if group == "verifying" else group
