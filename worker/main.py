"""Start and stop of the worker process."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import re
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from protocol.errors import SettingsError
from protocol.messages import Heartbeat, ModelInfo, Phase
from protocol.model_path import cache_dir, resolve_model
from protocol.notify import Notifier
from protocol.rundir import lock_run_dir, prepare_run_dir
from protocol.settings import load_settings
from worker.config import WorkerSettings
from worker.io import WorkerSockets
from worker.model_error import ModelError
from worker.step_watch import Verdict

if TYPE_CHECKING:
    from worker.engine import Engine

log = logging.getLogger(__name__)

STAGE_SECONDS = 600.0  # what one part of the start may take: the first one on a machine compiles kernels
EXIT_FAILED = 1
EXIT_USAGE = 2  # settings, or a model, that no restart will mend
_IMPORTS_NUMBA = re.compile(rb"^(from|import) numba\b", re.MULTILINE)
# Thread pools that spin collapse when cores are shared with the gateway, those that sleep at once pay a wake-up for
# each of thousands of short operations: so they spin for some 20 microseconds and then sleep. Read by OpenMP when
# torch is imported. Measured at one row: 25 ms a decode step, 65 ms with passive waiting, 47 ms with long spins.
_THREAD_ENVIRONMENT = {"GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "0"}


class Worker:
    """The phase the process is in, for heartbeats, and what has been built so far."""

    def __init__(self, settings: WorkerSettings, notifier: Notifier) -> None:
        self.settings = settings
        self.notifier = notifier
        self.epoch = secrets.token_hex(8)
        self.phase: Phase = "starting"
        self.detail = ""
        self.model: ModelInfo | None = None
        self.engine: Engine | None = None
        self.sockets = WorkerSockets(
            settings.run_dir, self.epoch, self.heartbeat, work=settings.work_at, control=settings.control_at
        )
        self._stage_began = self.sockets.time.awake()

    def heartbeat(self) -> Heartbeat:
        """Read on the socket thread; every field is one reference or number."""
        engine = self.engine
        phase, detail = self.phase, self.detail
        if verdict := self._verdict():
            phase, detail = verdict
            if phase == "failed":
                self.notifier.trigger_watchdog(detail)
        return Heartbeat(
            epoch=self.epoch,
            phase=phase,
            detail=detail,
            loop_age_seconds=engine.watch.age() if engine else 0.0,
            requests_running=engine.running_count if engine else 0,
            requests_waiting=engine.waiting_count if engine else 0,
            model=self.model,
        )

    def _verdict(self) -> Verdict | None:
        """What is wrong with a process that lives; None while nothing is."""
        if self.phase == "ready" and self.engine is not None:
            return self.engine.watch.verdict()
        seconds = self.sockets.time.awake() - self._stage_began
        if self.phase in ("starting", "loading") and seconds > STAGE_SECONDS:
            return Verdict("failed", f"{self.detail or self.phase} has been going on for {seconds:.0f} s")
        return None

    def loading(self, detail: str) -> None:
        """A part of the start begins, or gets on."""
        self._stage_began = self.sockets.time.awake()
        self.phase, self.detail = "loading", detail
        self.notifier.status(detail)
        log.info("%s", detail)

    def ready(self, engine: Engine, model: ModelInfo) -> None:
        self.engine, self.model = engine, model
        self.phase, self.detail = "ready", ""
        self.sockets.accepting = True
        self.sockets.beat()
        self.notifier.ready(f"serving {self.settings.model}")
        log.info("ready")

    def request_stop(self, _signal: int, _frame: FrameType | None) -> None:
        self.notifier.stopping()
        if self.engine is None:
            raise SystemExit(0)
        self.phase = "stopping"
        self.engine.stop()


def kernel_cache() -> Path:
    """Where compiled kernels are kept: a folder for each state of their sources.

    Numba compares only the file in which a kernel stands, but most are made of functions of other files as well.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    texts = [text for file in sources if _IMPORTS_NUMBA.search(text := file.read_bytes())]
    return cache_dir() / "numba" / hashlib.blake2b(b"".join(texts), digest_size=8).hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """`prefixd worker`. Returns the exit code: 0 stopped, 1 failed, 2 wrong settings."""
    for name, value in {**_THREAD_ENVIRONMENT, "NUMBA_CACHE_DIR": str(kernel_cache())}.items():
        os.environ.setdefault(name, value)
    settings = load_settings(
        WorkerSettings,
        sys.argv[1:] if argv is None else argv,
        "prefixd worker",
        "Run the model and own its KV memory.",
    )
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s worker %(levelname)s %(message)s")
    try:
        path = resolve_model(settings.model)
        prepare_run_dir(settings.run_dir)
        lock = lock_run_dir(settings.run_dir, "worker")
        notifier = Notifier()
        worker = Worker(settings, notifier)
    except SettingsError as error:
        print(f"prefixd worker: {error}", file=sys.stderr)
        return EXIT_USAGE
    worker.sockets.start()
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, worker.request_stop)
        from worker.build import build  # imports torch: after the sockets can say that the worker is loading

        engine, model = build(settings, path, worker.sockets, worker.epoch, worker.loading)
        gc.freeze()  # what has been loaded lives as long as the process: to look through it takes a tenth of a second
        worker.ready(engine, model)
        engine.run(notifier.alive)
        return 0
    except SystemExit:
        return 0
    except (SettingsError, ModelError) as error:
        worker.phase, worker.detail = "failed", str(error)
        print(f"prefixd worker: {error}", file=sys.stderr)
        return EXIT_USAGE
    except Exception as error:
        worker.phase, worker.detail = "failed", f"{type(error).__name__}: {error}"
        log.debug("failed", exc_info=True)
        print(f"prefixd worker: {worker.detail}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        if worker.engine is not None:
            worker.engine.close()
        worker.sockets.stop()
        lock.close()
        notifier.close()
