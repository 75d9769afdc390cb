"""Start and stop of the gateway process."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence

import uvloop
from aiohttp import web

from gateway.app import build_app
from gateway.config import GatewaySettings
from gateway.model_files import load_model_files
from gateway.prompts import PromptMaker
from gateway.service import Gateway
from gateway.worker_client import WorkerClient
from protocol.errors import SettingsError
from protocol.model_path import resolve_model
from protocol.rundir import WORK_SOCKET, prepare_run_dir, socket_address
from protocol.settings import load_settings

EXIT_FAILED = 1

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
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its thread pool would take the worker's cores
    try:
        prepare_run_dir(settings.run_dir)
        maker = PromptMaker(load_model_files(resolve_model(settings.model), settings.chat_template))
        gc.collect()
        gc.freeze()  # what has been loaded lives as long as the process: no need to look through it again
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, maker))
    except (SettingsError, OSError) as error:
        _log.error("%s", error)
        return EXIT_FAILED
    return 0


async def _serve(settings: GatewaySettings, maker: PromptMaker) -> None:
    """Run until SIGTERM or SIGINT; a second one cuts the grace period short."""
    client = WorkerClient(socket_address(settings.run_dir, WORK_SOCKET))
    gateway = Gateway(settings, maker, client)
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    runner = web.AppRunner(build_app(gateway), handler_cancellation=True, access_log=None)
    await client.start()
    try:
        await runner.setup()
        site = web.TCPSite(runner, settings.host, settings.port)
        await site.start()
        _log.info("listening on %s", ", ".join(f"http://{host}:{port}" for host, port, *_ in runner.addresses))
        await stop.wait()
        await gateway.drain(hurry)
    finally:
        await runner.cleanup()
        gateway.close()
        await client.close()


if __name__ == "__main__":
    sys.exit(main())
