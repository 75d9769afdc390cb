"""`prefixd serve`: the whole daemon in one command, worker and gateway supervised."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

from pydantic import create_model

from gateway.config import GatewaySettings
from gateway.fetch import FetchError, fetch_embedded
from gateway.supervisor import Child, ChildFailed, Health, Supervisor
from protocol.control_client import CommandRefused, ControlClient
from protocol.errors import SettingsError, WorkerUnavailable
from protocol.model_path import EMBEDDED_MODEL, resolve_model
from protocol.notify import Notifier
from protocol.rundir import CONTROL_SOCKET, WORK_SOCKET, default_run_dir, lock_run_dir, prepare_run_dir
from protocol.settings import ENV_PREFIX, load_settings, process_settings, to_flags

WORKER_STOP_SECONDS = 10.0
PROBE_TIMEOUT_SECONDS = 1.0


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT. Exit codes: 0 stopped, 1 a process does not come up, 2 bad settings."""
    settings = load_settings(_union(), argv, "prefixd serve", "Serve a model: worker and gateway, supervised.")
    prepare_run_dir(settings.run_dir)
    notifier = Notifier()
    with lock_run_dir(settings.run_dir, "daemon"):
        try:
            _have_model(settings.model)
            settings = settings.model_copy(update={"port": _free_port(settings.host, settings.port)})
            asyncio.run(_supervise(settings, notifier))
        except (ChildFailed, FetchError) as error:
            print(f"prefixd serve: error: {error}", file=sys.stderr)
            return 1
        finally:
            _remove_sockets(settings.run_dir)
            notifier.close()
    return 0


def _union() -> type[GatewaySettings]:
    """Settings that are those of the gateway and of the worker, which this room knows by name only."""
    both = create_model("ServeSettings", __base__=(GatewaySettings, process_settings()["worker"]))
    return cast(type[GatewaySettings], both)


async def _supervise(settings: GatewaySettings, notifier: Notifier) -> None:
    worker_settings = process_settings()["worker"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    prefixd = [sys.executable, "-m", "gateway.cli"]
    gateway = Child(
        "gateway",
        [*prefixd, "gateway", *to_flags(settings, GatewaySettings)],
        lambda: _gateway_health(settings),
        stop_seconds=settings.grace_seconds + 5,
        environment=environment,
    )
    worker = Child(
        "worker",
        [*prefixd, "worker", *to_flags(settings, worker_settings)],
        lambda: _worker_health(settings),
        stop_seconds=WORKER_STOP_SECONDS,
        environment=environment,
    )

    def on_ready() -> None:
        notifier.ready(f"serving {settings.model}")
        _welcome(settings)

    await Supervisor([gateway, worker], _report, on_ready).run()


def _have_model(model: str) -> None:
    """Fetch the embedded model unless it is here. Raises `SettingsError` for another one that is not."""
    try:
        resolve_model(model)
    except SettingsError:
        if model != EMBEDDED_MODEL:
            raise
        fetch_embedded()


def _free_port(host: str, port: int) -> int:
    """The port to give the gateway: a free one for 0. Taken here, it stays the same when the gateway restarts."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.create_server(address[:2], family=family) as probe:
            bound: int = probe.getsockname()[1]
            return bound
    except OSError as error:
        raise SettingsError(f"port: cannot listen on {host}:{port}: {error.strerror}") from error


async def _gateway_health(settings: GatewaySettings) -> Health:
    """Ready once it answers HTTP, whatever the worker's state."""
    return Health("ready" if await _answers(settings, "/health") else "starting")


async def _worker_health(settings: GatewaySettings) -> Health:
    """Ready once the gateway has noticed that it is: from then on requests are served."""
    health = await asyncio.to_thread(_heartbeat, settings.run_dir)
    if health.state == "ready" and not await _answers(settings, "/ready"):
        return Health("starting")
    return health


def _heartbeat(run_dir: Path) -> Health:
    try:
        with ControlClient(run_dir, PROBE_TIMEOUT_SECONDS) as client:
            heartbeat = client.ask("health")
    except (WorkerUnavailable, CommandRefused):
        return Health("starting")
    match heartbeat:
        case {"phase": "ready"}:
            return Health("ready")
        case {"phase": "failed", "detail": str(cause)}:
            return Health("failed", cause)
        case _:
            return Health("starting")


async def _answers(settings: GatewaySettings, path: str) -> bool:
    """Whether the gateway answers 200 at `path`."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
            reader, writer = await asyncio.open_connection(_reachable(settings.host), settings.port)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: prefixd\r\nConnection: close\r\n\r\n".encode())
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


def _reachable(host: str) -> str:
    """An address at which this machine reaches what listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _report(line: str) -> None:
    print(f"prefixd: {line}", file=sys.stderr, flush=True)


def _welcome(settings: GatewaySettings) -> None:
    host = _reachable(settings.host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
    question = [{"role": "user", "content": "Write one sentence about the sea."}]
    body = json.dumps({"model": settings.model, "temperature": 0, "max_tokens": 100, "messages": question})
    key = " -H 'authorization: Bearer KEY'" if settings.api_keys else ""
    cachectl = "cachectl" if shutil.which("cachectl") else str(Path(sys.executable).with_name("cachectl"))
    if settings.run_dir != default_run_dir():
        cachectl += f" --run-dir {settings.run_dir}"
    print(
        f"""
prefixd serves {settings.model} on {url}

Ask it something:
  curl {url}/v1/chat/completions -H 'content-type: application/json'{key} \\
    -d '{body}'

See what it has cached:
  {cachectl} list
""",
        flush=True,
    )


def _remove_sockets(run_dir: Path) -> None:
    """Remove what a killed worker left; those of a worker that somebody else runs here stay."""
    with suppress(SettingsError), lock_run_dir(run_dir, "worker"):
        for name in (WORK_SOCKET, CONTROL_SOCKET):
            (run_dir / name).unlink(missing_ok=True)
