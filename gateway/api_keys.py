"""API keys: who may ask, and whose cache a request uses. Read from a file that may change while the gateway runs.

```toml
secret = "64 hexadecimal digits"        # what tenants' digests are salted from: with another one nothing is found again
admin_keys = ["sha256:HEX"]             # for /metrics; they ask nothing else

[tenants.team-a]
keys = ["sha256:HEX", "a key as it is"] # the SHA-256 of a key, or the key
shared_head = "house"                   # tenants with the same word share tools and system text, and nothing else
```
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.tenants import Tenant
from protocol.errors import RequestError, SettingsError

MIN_KEY_CHARACTERS = 16  # of a key that is written as it is
MIN_SECRET_CHARACTERS = 32
NAME_PATTERN = r"[A-Za-z0-9_-]{1,64}"
HASHED = "sha256:"

_POLL_SECONDS = 1.0
_MAX_FILE_BYTES = 16 << 20
_FORBIDDEN_MODE = stat.S_IRWXO | stat.S_IWGRP

_log = logging.getLogger("prefixd.gateway")
_Name = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]
_Key = Annotated[str, Field(min_length=MIN_KEY_CHARACTERS, max_length=1024)]


class _TenantEntry(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    keys: Annotated[list[_Key], Field(min_length=1)]
    shared_head: _Name | None = None


class _KeyFile(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    secret: Annotated[str, Field(min_length=MIN_SECRET_CHARACTERS)]
    admin_keys: list[_Key] = []
    tenants: Annotated[dict[_Name, _TenantEntry], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class _Holder:
    """Who holds a key: a tenant, or an admin (None)."""

    digest: bytes
    tenant: Tenant | None


class ApiKeys:
    """The keys of one file. What is wrong with its later versions is logged, counted by `on_read`, and not used."""

    def __init__(self, path: Path) -> None:
        """Raises `SettingsError`."""
        self._path = path
        self._seen = _version(path)
        self._holders = _load(path)
        self.on_read: Callable[[bool], None] = lambda fine: None  # told of every later version if it is used

    def tenant(self, headers: Mapping[str, str]) -> Tenant:
        """The tenant whose key a request bears. Raises `RequestError`."""
        holder = self._holder(headers)
        if holder.tenant is None:
            raise RequestError("this key is for administration alone", code="permission_denied", status=403)
        return holder.tenant

    def check_admin(self, headers: Mapping[str, str]) -> None:
        """Raises `RequestError` unless a request bears an admin's key."""
        if self._holder(headers).tenant is not None:
            raise RequestError("this needs an admin's key", code="permission_denied", status=403)

    def _holder(self, headers: Mapping[str, str]) -> _Holder:
        given = list(_given(headers))
        for key in given:
            digest = sha256(key.encode(errors="surrogateescape")).digest()
            found = None
            for holder in self._holders:  # all of them, so that the time tells nothing of which is near
                if hmac.compare_digest(holder.digest, digest):
                    found = holder
            if found is not None:
                return found
        words = "no such API key" if given else "an API key is needed: as `Authorization: Bearer` or `x-api-key`"
        raise RequestError(words, code="invalid_api_key", status=401)

    async def watch(self) -> None:
        """Look for another version of the file, until cancelled."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> None:
        """Read the file again if it has changed since the last look."""
        version = _version(self._path)
        if version == self._seen:
            return
        self._seen = version
        try:
            self._holders = _load(self._path)
        except SettingsError as error:
            _log.error("%s; the keys read before go on being used", error)
            self.on_read(False)
        else:
            _log.info("api_keys: read again: %d keys", len(self._holders))
            self.on_read(True)


def _given(headers: Mapping[str, str]) -> Iterator[str]:
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        yield token.strip()
    if own := headers.get("x-api-key", "").strip():
        yield own


def _version(path: Path) -> tuple[int, ...]:
    """Something that changes whenever the file does; empty where there is none."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def _load(path: Path) -> tuple[_Holder, ...]:
    """Raises `SettingsError`, which says nothing of what the file holds."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE_BYTES:
                raise SettingsError(f"api_keys: {path} is no file of keys")
            if status.st_mode & _FORBIDDEN_MODE:
                mode = stat.S_IMODE(status.st_mode)
                raise SettingsError(
                    f"api_keys: {path} is open to others (mode {mode:04o}): make it 0600, or 0640 for a group to read"
                )
            fields = tomllib.load(file)
        return tuple(_holders(_KeyFile.model_validate(fields), path))
    except OSError as error:
        raise SettingsError(f"api_keys: cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"] if part != "[key]")
        raise SettingsError(f"api_keys: {path}: {where}: {first['msg']}") from None  # the cause holds the input
    except (ValueError, RecursionError):  # bad UTF-8 and bad TOML alike
        raise SettingsError(f"api_keys: {path} is not TOML") from None


def _without_waiting(path: str, flags: int) -> int:
    """A pipe that nobody writes into would be waited for without end."""
    return os.open(path, flags | os.O_NONBLOCK)


def _holders(file: _KeyFile, path: Path) -> Iterator[_Holder]:
    groups = {entry.shared_head for entry in file.tenants.values() if entry.shared_head}
    if both := sorted(groups & file.tenants.keys()):
        raise SettingsError(f"api_keys: {path}: shared_head {both[0]} is the name of a tenant too")
    owners: dict[bytes, str] = {}
    secret = file.secret.encode()
    for name, entry in file.tenants.items():
        group = entry.shared_head or ""
        tenant = Tenant(
            name, _salt(secret, b"tenant", name), group, _salt(secret, b"head", group) if group else ""
        )
        for digest in _digests(entry.keys, f"{path}: tenants.{name}.keys", owners):
            yield _Holder(digest, tenant)
    for digest in _digests(file.admin_keys, f"{path}: admin_keys", owners):
        yield _Holder(digest, None)


def _digests(keys: list[str], where: str, owners: dict[bytes, str]) -> Iterator[bytes]:
    """The SHA-256 of each key. No key may belong to two."""
    for at, key in enumerate(keys):
        digest = sha256(key.encode()).digest()
        if key.startswith(HASHED):
            try:
                digest = bytes.fromhex(key.removeprefix(HASHED))
            except ValueError:
                digest = b""
            if len(digest) != sha256().digest_size:
                raise SettingsError(f"api_keys: {where}.{at}: {HASHED} is followed by 64 hexadecimal digits")
        if digest in owners:
            raise SettingsError(f"api_keys: {where}.{at} is the same key as one of {owners[digest]}")
        owners[digest] = where
        yield digest


def _salt(secret: bytes, kind: bytes, name: str) -> str:
    """Known to nobody without the secret, and the same after a restart and on another machine."""
    key = blake2b(secret, digest_size=32, person=b"prefixd-secret").digest()
    return blake2b(name.encode(), digest_size=16, key=key, person=b"prefixd-" + kind).hexdigest()
