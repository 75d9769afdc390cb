"""`prefixd keygen`: API keys for tenants, and CURVE keys for what goes over TCP."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import tomllib
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from gateway.api_keys import HASHED, NAME_PATTERN, ApiKeys
from protocol.curve import make_curve_keys, write_secret
from protocol.errors import SettingsError

_PREFIX = "pfx-"  # by which a key that turns up where it should not can be told


def main(argv: Sequence[str]) -> int:
    """Raises `SettingsError`."""
    asked = _parser().parse_args(argv)
    if asked.kind == "api":
        print(add_tenant(asked.file, asked.tenant))
    else:
        make_curve_keys([asked.file, *asked.peers])
    return 0


def add_tenant(file: Path, tenant: str) -> str:
    """Add a tenant, or a first one in a new file. The key, of which the file holds the hash only."""
    if not re.fullmatch(NAME_PATTERN, tenant):
        raise SettingsError(f"tenant: {tenant} is no name: up to 64 letters, digits, - and _")
    key = _PREFIX + secrets.token_urlsafe(32)
    hashed = HASHED + sha256(key.encode()).hexdigest()
    entry = f'\n[tenants.{tenant}]\nkeys = ["{hashed}"]\n'
    if not file.exists():
        write_secret(file, f'secret = "{secrets.token_hex(32)}"\n{entry}')
        return key
    ApiKeys(file)  # is one
    if tenant in tomllib.loads(file.read_text("utf-8"))["tenants"]:
        raise SettingsError(f'tenant: {tenant} is in {file}: add "{hashed}" to its keys there, for the key {key}')
    beside = file.with_name(file.name + ".new")
    write_secret(beside, file.read_text("utf-8") + entry)
    beside.chmod(file.stat().st_mode)
    os.replace(beside, file)  # at once: a gateway may be reading it
    return key


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prefixd keygen", description="Make keys.", allow_abbrev=False)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    api = kinds.add_parser("api", help="add a tenant to a file of API keys and print its key")
    api.add_argument("file", type=Path, metavar="FILE", help="made if it is not there")
    api.add_argument("tenant", metavar="TENANT")
    curve = kinds.add_parser("curve", help="make key files for a worker and those that reach it over TCP")
    curve.add_argument("file", type=Path, metavar="WORKER_FILE")
    curve.add_argument(
        "peers",
        type=Path,
        metavar="FILE",
        nargs="*",
        help="one for each gateway or cachectl; none: all use the first",
    )
    return parser
