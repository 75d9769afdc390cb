"""Whose cache a request uses, and the roots of digests that keep tenants apart.

```
| tools, system |  messages ...   |
  head_salt       salt              a tenant that shares its head: what goes on from there is its own again
  salt            salt              any other tenant
```
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from gateway.boundaries import Cut
from protocol.digest import DIGEST_BYTES, root_digest
from protocol.messages import Generate


@dataclass(frozen=True, slots=True)
class Tenant:
    """`salt` and `head_salt` are secrets. The nameless tenant is everybody, where there are no API keys."""

    name: str = ""
    salt: str = ""
    group: str = ""  # tenants of one group share heads
    head_salt: str = ""

    @property
    def cache(self) -> str:
        """The tenant by the worker's lights. A group is one: its members are kept apart by their digests."""
        return self.group or self.name

    def root(self, fingerprint: str) -> bytes:
        """The digest of the empty prefix."""
        return root_digest(fingerprint, self.salt)

    def head_root(self, fingerprint: str) -> bytes:
        """The same, for the head that is shared with the group."""
        return root_digest(fingerprint, self.head_salt)

    def parted(self, head: bytes) -> bytes:
        """From where a conversation goes on that is the tenant's own, behind a shared head of this digest."""
        return blake2b(
            head, digest_size=DIGEST_BYTES, key=bytes.fromhex(self.salt), person=b"prefixd-parted"
        ).digest()

    def shared(self, cuts: Sequence[Cut]) -> int:
        """How many of a prompt's cuts are its group's: those up to the head."""
        if not self.group:
            return 0
        return next((at for at, cut in enumerate(cuts, 1) if cut.kind == "head"), 0)

    def scoped(self, request_id: str) -> str:
        """An id as it is used and told from here on: two tenants may ask for the same one, and neither learns of it.

        No name has a dot in it.
        """
        return f"{self.name}.{request_id}" if self.name else request_id

    def own(self, request: Generate) -> Generate:
        """The request as this tenant's."""
        if not self.name:
            return request
        return replace(request, tenant=self.cache, member=self.name if self.group else "")


ANYONE = Tenant()
