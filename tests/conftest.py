"""What the suite's processes share: compiled kernels, and with `-n` the tests, those of one daemon in one process."""

from __future__ import annotations

import os
import signal
from pathlib import PurePosixPath

import pytest
from xdist.scheduler import LoadScopeScheduling

from worker.main import kernel_cache

# Before numba is imported. What a daemon has compiled is not compiled again in a process of tests, nor the reverse.
os.environ.setdefault("NUMBA_CACHE_DIR", str(kernel_cache()))

# Before torch is imported. The threads of a product wait for each other: where two processes of tests each have one on
# every core, a product takes ten times as long. Daemons that tests start have all cores, and do not spin for them.
_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
THREADS = max(1, (os.cpu_count() or 1) // _PROCESSES)
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A shell ignores it for what it starts in the background, and so would all commands that the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_FAMILIES = ("llama", "qwen3_5", "gemma4")
# Modules that use the same daemons of a session: elsewhere these are started once more.
_TOGETHER = {
    "embedded": ("test_forced_answers", "test_real_model", "test_tools"),
    "llama": ("test_burned_slots", "test_conversations", "test_memory_pressure", "test_shared_slots"),
    "plain": (
        "test_accounting",
        "test_answers",
        "test_boundaries_live",
        "test_cachectl_live",
        "test_evicting_described",
        "test_hanging_up",
        "test_hints_live",
        "test_many_clients",
        "test_messages_api",
        "test_responses_api",
        "test_routes",
        "test_status_page",
        "test_warming",
    ),
    "services": ("test_nginx_live", "test_notify_live", "test_prometheus_live"),
}
_GROUPS = {module: group for group, modules in _TOGETHER.items() for module in modules}
# Of so short tests that a process had better run all.
_WHOLE_ROOMS = ("gateway", "cachectl", "protocol")


class Groups(LoadScopeScheduling):
    """A process runs the tests of a group one after the other; groups of many tests are begun first."""

    def _split_scope(self, nodeid: str) -> str:
        path, _, name = nodeid.partition("::")
        _, room, *_ = PurePosixPath(path).parts
        module, (_, _, params) = PurePosixPath(path).stem, name.partition("[")
        if room in _WHOLE_ROOMS:
            return room
        if module == "test_whole_step":  # most of its time it compiles kernels, each of which serves several tests
            return module
        if room == "worker":  # these make a model and its cold answers for several tests; others may run anywhere
            return f"{module}[{params}" if module.startswith("test_exactness") and params else nodeid
        families = set(params.rstrip("]").split("-")).intersection(_FAMILIES)
        return families.pop() if families else _GROUPS.get(module, module)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Groups | None:
    return Groups(config, log) if config.getvalue("dist") == "loadscope" else None
