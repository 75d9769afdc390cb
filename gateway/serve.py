"""`prefixd serve`: the whole daemon in one command, worker and gateways supervised."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, cast

from pydantic import create_model

from gateway.config import GatewaySettings, ServeSettings
from gateway.fetch import FetchError, fetch_embedded
from gateway.health import GatewayHealth, WorkerHealth
from gateway.ports import take_port
from gateway.seats import forget_counts
from gateway.supervisor import WATCH_SECONDS, Child, ChildFailed, Supervisor
from protocol.errors import SettingsError
from protocol.model_path import EMBEDDED_MODEL, resolve_model
from protocol.notify import Notifier
from protocol.rundir import (
    CONTROL_SOCKET,
    WORK_SOCKET,
    default_run_dir,
    is_in_place,
    kept_from_cleaning,
    lock_run_dir,
    prepare_run_dir,
)
from protocol.settings import ENV_PREFIX, load_settings, process_settings, to_flags

WORKER_STOP_SECONDS = 10.0


class _Settings(ServeSettings, GatewaySettings):
    """Ours and those of the gateways."""


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT.

    Exit codes: 0 stopped, 1 a process does not come up, or had to be killed in the end, 2 bad settings.
    """
    settings = load_settings(_union(), argv, "prefixd serve", "Serve a model: worker and gateways, supervised.")
    notifier = Notifier()
    try:
        _serve_until_stopped(settings, notifier)
    except (ChildFailed, FetchError) as error:
        print(f"prefixd serve: error: {error}", file=sys.stderr)
        return 1
    finally:
        notifier.close()
    return 0


def _serve_until_stopped(settings: _Settings, notifier: Notifier) -> None:
    """Where somebody removes the run directory under the sockets, it goes on in another one."""
    with ExitStack() as held:
        lost = False
        while True:
            prepare_run_dir(settings.run_dir)
            with lock_run_dir(settings.run_dir, "daemon") as lock, kept_from_cleaning(settings.run_dir):
                if not lost:
                    _have_model(settings.model)
                    # Held here, it stays the same, and ours, when a gateway starts again.
                    port = held.enter_context(take_port(settings.host, settings.port))
                    settings = settings.model_copy(update={"port": port.getsockname()[1]})
                lost = _is_lost_while_serving(settings, notifier, lock)
            if not lost:
                return
            _report(f"the run directory {settings.run_dir} was removed: starting again in another one")


def _is_lost_while_serving(settings: _Settings, notifier: Notifier, lock: IO[str]) -> bool:
    """Serve until a signal says stop, or until the directory of the lock is gone."""
    forget_counts(settings.run_dir)
    try:
        return asyncio.run(_supervise(settings, notifier, lock))
    finally:
        if is_in_place(lock):
            _remove_sockets(settings.run_dir)
            forget_counts(settings.run_dir)


def _union() -> type[_Settings]:
    """Settings that are ours, the gateway's and the worker's, which this room knows by name only."""
    all_of_them = create_model("AllSettings", __base__=(_Settings, process_settings()["worker"]))
    return cast(type[_Settings], all_of_them)


async def _supervise(settings: _Settings, notifier: Notifier, lock: IO[str]) -> bool:
    """Whether the end of it was that the lock's directory was removed, and no signal."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    prefixd = [sys.executable, "-m", "gateway.cli"]

    def on_ready() -> None:
        notifier.ready(f"serving {settings.model}")
        _welcome(settings)

    with ExitStack() as open_sockets:
        healths = []
        for number in range(settings.gateways):
            healths.append(GatewayHealth(settings.run_dir, number, settings.hung_seconds))
            open_sockets.callback(healths[-1].close)
        gateways = [
            Child(
                "gateway" if settings.gateways == 1 else f"gateway {number}",
                [*prefixd, "gateway", *to_flags(settings, GatewaySettings)],
                health,
                stop_seconds=settings.grace_seconds + 5,
                environment={**environment, **health.environment},
            )
            for number, health in enumerate(healths)
        ]
        worker = Child(
            "worker",
            [*prefixd, "worker", *to_flags(settings, process_settings()["worker"])],
            WorkerHealth(settings.control_at, settings.hung_seconds, healths),
            stop_seconds=WORKER_STOP_SECONDS,
            environment=environment,
        )
        supervisor = Supervisor([gateways, [worker]], _report, on_ready)
        lost = asyncio.create_task(_stop_when_lost(lock, supervisor))
        await supervisor.run()
        if supervisor.was_told and supervisor.killed:
            raise ChildFailed(f"had to be killed, as it did not stop in time: {', '.join(supervisor.killed)}")
        return not lost.cancel() and not supervisor.was_told


async def _stop_when_lost(lock: IO[str], supervisor: Supervisor) -> None:
    """Nobody new reaches sockets whose directory is gone. What is open goes on through those that are connected."""
    while is_in_place(lock):  # noqa: ASYNC110 (nobody tells)
        await asyncio.sleep(WATCH_SECONDS)
    supervisor.stop()


def _have_model(model: str) -> None:
    """Fetch the embedded model unless it is here. Raises `SettingsError` for another one that is not."""
    try:
        resolve_model(model)
    except SettingsError:
        if model != EMBEDDED_MODEL:
            raise
        fetch_embedded()


def _reachable(host: str) -> str:
    """An address at which this machine reaches what listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _report(line: str) -> None:
    print(f"prefixd: {line}", file=sys.stderr, flush=True)


def _welcome(settings: _Settings) -> None:
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
