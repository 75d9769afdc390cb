"""The numerics id: what, besides the model and the tokens, the bits of a state depend on (design, Exactness 6)."""

from __future__ import annotations

import platform
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from worker.row_check import RowCounts

_LIBRARIES = ("torch", "numba", "llvmlite", "numpy", "triton")
_SOURCES = Path(__file__).parent


def numerics_id(device: torch.device, row_counts: RowCounts) -> str:
    """16 hex digits, the same for two workers that compute the same bits.

    Covers library versions, the device and what it can do, the number of threads, the listed row counts and our own
    kernels. Two ids may differ where bits would not: a state is then computed again.
    """
    state = blake2b(digest_size=8, person=b"prefixd-numeric")
    facts = [
        *(f"{name} {_version(name)}" for name in _LIBRARIES),
        f"device {_device(device)}",
        f"threads {torch.get_num_threads()}",
        f"rows {row_counts}",
        f"kernels {_kernels()}",
    ]
    for fact in facts:
        state.update(f"{len(fact)}:{fact}".encode())
    return state.hexdigest()


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "none"


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return (
            f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)} {torch.version.cuda}"
        )
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_processor()}"


def _processor() -> str:
    """Its model and instruction set: libraries choose their kernels by both."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return "; ".join(facts.get(key, "") for key in ("vendor_id", "cpu family", "model", "model name", "flags"))


@cache
def _kernels() -> str:
    """A hash of every file here that computes, as they were when this process first asked."""
    state = blake2b(digest_size=16)
    for path in sorted(_SOURCES.rglob("*.py")):
        text = path.read_bytes()
        computes = any(
            word in text for word in (b"import torch", b"from numba", b"import numba", b"import triton")
        )
        if computes and "tiers" not in path.parts:
            state.update(text)
    return state.hexdigest()
