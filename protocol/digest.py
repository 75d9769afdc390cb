"""Chained boundary digests: the name of everything before a boundary.

BLAKE2b (RFC 7693) with a 16-byte output. The root binds the model and the tenant; each link binds the
previous digest, the number of ids in the message and the ids themselves as little-endian int32. A digest
therefore names both the tokens of a prefix and the positions of all boundaries in it, and is stable across
processes and machines.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from hashlib import blake2b

DIGEST_BYTES = 16


def root_digest(fingerprint: str, tenant: str = "") -> bytes:
    """The digest of the empty prefix for one model and one tenant."""
    state = blake2b(digest_size=DIGEST_BYTES, person=b"prefixd-root")
    for part in (fingerprint.encode(), tenant.encode()):
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def link_digest(parent: bytes, token_ids: array[int] | memoryview) -> bytes:
    """The digest after appending `token_ids` (int32) to the prefix that `parent` names."""
    data = token_ids if isinstance(token_ids, memoryview) else memoryview(token_ids)
    if data.itemsize != 4:
        raise ValueError("token ids must be int32")
    state = blake2b(parent, digest_size=DIGEST_BYTES, person=b"prefixd-link")
    state.update(len(data).to_bytes(8, "little"))
    if sys.byteorder == "big":
        swapped = array("i", data)
        swapped.byteswap()
        data = memoryview(swapped)
    state.update(data.cast("B"))
    return state.digest()


def chain_digests(root: bytes, token_ids: array[int], ends: Iterable[int]) -> list[bytes]:
    """Digests at each of the rising positions `ends` of `token_ids`."""
    view = memoryview(token_ids)
    digests: list[bytes] = []
    parent, start = root, 0
    for end in ends:
        if not start < end <= len(view):
            raise ValueError(f"boundary {end} does not rise within {len(view)} tokens")
        parent = link_digest(parent, view[start:end])
        digests.append(parent)
        start = end
    return digests
