"""Start and stop of the gateway process."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

import uvloop
from aiohttp import web

from gateway.app import build_metrics_runner, build_runner
from gateway.config import GatewaySettings
from gateway.health import SERVING
from gateway.model_files import load_model_files
from gateway.ports import listen
from gateway.prompts import PromptMaker
from gateway.service import Gateway
from gateway.worker_client import WorkerClient
from protocol.errors import SettingsError
from protocol.model_path import resolve_model
from protocol.notify import Notifier
from protocol.rundir import prepare_run_dir
from protocol.settings import load_settings

EXIT_FAILED, EXIT_USAGE = 1, 2
_THIS_MACHINE = "127.0.0.1"
FIRST_WORD_SECONDS = 2.0  # in which a worker that serves is heard of
STATUS_SECONDS = 0.2  # between two looks at the worker for the service manager

_log = logging.getLogger("prefixd.gateway")


def main(argv: Sequence[str] | None = None) -> int:
    """`prefixd gateway`. Returns the exit code: 0 stopped, 1 failed, 2 wrong settings."""
    arguments = sys.argv[1:] if argv is None else argv
    settings = load_settings(GatewaySettings, arguments, "prefixd gateway", "Serve HTTP for a running worker.")
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    notifier = Notifier()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its thread pool would take the worker's cores
    try:
        prepare_run_dir(settings.run_dir)
        maker = PromptMaker(load_model_files(resolve_model(settings.model), settings.chat_template))
        gc.collect()
        gc.freeze()  # what has been loaded lives as long as the process: no need to look through it again
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, maker, notifier))
    except SettingsError as error:
        _log.error("%s", error)
        return EXIT_USAGE  # trying again cannot help, the supervisor and the service manager take from this
    except OSError as error:
        _log.error("%s", error)
        return EXIT_FAILED
    finally:
        notifier.close()
    return 0


async def _serve(settings: GatewaySettings, maker: PromptMaker, notifier: Notifier) -> None:
    """Run until SIGTERM or SIGINT; a second one cuts the grace period short."""
    client = WorkerClient(settings.work_at)
    gateway = Gateway(settings, maker, client)
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        notifier.stopping()
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    runner = build_runner(gateway)
    runners = [runner]
    await client.start()
    try:
        await runner.setup()
        if gateway.metrics.seat.shares(settings.port):
            await _hear_of_worker(client)
        await listen(runner, settings.host, settings.port, gateway.metrics.seat)
        _log.info("listening on %s", ", ".join(f"http://{host}:{port}" for host, port, *_ in runner.addresses))
        if settings.metrics_port is not None and gateway.metrics.seat.number == 0:  # its metrics are those of all
            runners.append(build_metrics_runner(gateway))
            await runners[1].setup()
            await web.TCPSite(runners[1], _THIS_MACHINE, settings.metrics_port).start()
        notifier.ready(_status(client))
        watched = [asyncio.create_task(_keep_telling(notifier, client, stop))]
        if gateway.keys is not None:
            watched.append(asyncio.create_task(gateway.keys.watch()))
        await stop.wait()
        if gateway.metrics.seat.leaves(runner.addresses[0][1]):
            await runner.step_aside()  # who comes now is served by another one
        await gateway.drain(hurry)
        for task in watched:
            task.cancel()
    finally:
        for each in runners:
            await each.cleanup()
        gateway.close()
        await client.close()


async def _hear_of_worker(client: WorkerClient) -> None:
    """Until it takes requests, if that is soon: so long they are better served by the gateways that are there."""
    with suppress(TimeoutError):
        async with asyncio.timeout(FIRST_WORD_SECONDS):
            while client.why_not_ready() is not None:  # noqa: ASYNC110 (the client tells nobody)
                await asyncio.sleep(FIRST_WORD_SECONDS / 100)


async def _keep_telling(notifier: Notifier, client: WorkerClient, stop: asyncio.Event) -> None:
    """Tell the service manager, until cancelled, that the event loop turns, and what it can do."""
    while True:
        notifier.alive()
        if not stop.is_set():
            notifier.status(_status(client))
        await asyncio.sleep(min(notifier.beat_seconds or STATUS_SECONDS, STATUS_SECONDS))


def _status(client: WorkerClient) -> str:
    return client.why_not_ready() or SERVING


if __name__ == "__main__":
    sys.exit(main())
