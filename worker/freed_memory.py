"""Memory that has been freed, which the C library keeps for what comes next."""

from __future__ import annotations

import ctypes

# glibc has it. Others, such as musl, give large parts back by themselves.
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back_freed() -> None:
    """Let the system have it.

    Once tensors of up to 32 MiB have come and gone, glibc takes all of that size from its heap, and what is freed
    between two that stay is kept: 0.6 GB beside 1.3 GB of weights, measured on 12 layers of 1024 and 2816 in float32.
    """
    if _trim is not None:
        _trim(0)
