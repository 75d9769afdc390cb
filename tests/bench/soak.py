"""Let clients with secret words crowd a daemon of three slots whose worker is killed at random, and look for harm.

    soak.py --minutes 10
    soak.py --minutes 2 --model DIRECTORY --flags "--kv-memory 1GiB"

Each of 16 clients asks in two conversations by turns, goes on, asks anew, edits its history and hangs up in the
middle of answers. Prints one table; the exit status is 1 if anything in it is a violation.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from client_bench import say
from server_process import running, split_command
from soak_client import Seen, SoakClient, Tally, secret_words
from soak_watch import PERIOD_SECONDS, Watch

CLIENTS = 16
SLOTS = 3
REST_SECONDS = 120.0  # for the worker to come to rest at the end, with all hits verified
KILLED_SHARE = 0.6  # of the time, from its beginning, in which the worker is killed: then its memory is watched
ERROR_SECONDS = 5.0  # in which those whose worker is killed must hear of it
_FAULT = re.compile(
    r"^Traceback|^\S+ \S+ (?:worker )?(?:ERROR|CRITICAL) .*|.*differs from a cold run.*", re.MULTILINE
)
_LOST = "the worker has been silent"  # what the gateway says of a killed worker is no fault


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table. `bad` says whether it is a violation."""

    name: str
    value: object
    bad: bool = False


async def main(argv: Sequence[str] | None = None) -> int:
    """Run and print. Returns 1 if there was a violation."""
    asked = _parser().parse_args(argv)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="pfx-soak-") as folder:
        run_dir, log = Path(folder) / "run", Path(folder) / "log"
        url = f"http://127.0.0.1:{port}"
        flags = ["--slots", str(SLOTS), "--deterministic", "--verify-hits", "1", "--kv-memory", asked.kv_memory]
        flags += ["--model", asked.model] if asked.model else []
        where = ["--port", str(port), "--run-dir", str(run_dir)]
        prefixd = [sys.executable, "-m", "gateway.cli", "serve", *where, *flags, *split_command(asked.flags)]
        async with running(prefixd, f"{url}/ready", str(log)):
            lines = await _soak(asked, url, run_dir)
        lines += _log_lines(log.read_text(errors="replace"))
    print(render(lines))
    return any(line.bad for line in lines)


async def _soak(asked: argparse.Namespace, url: str, run_dir: Path) -> list[Line]:
    secrets = secret_words(asked.clients, random.Random(0))
    tally, watch = Tally(), Watch(run_dir)
    began = time.monotonic()
    until = began + asked.minutes * 60
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        clients = [
            SoakClient(session, url, number, secrets, tally, asked.deadline) for number in range(asked.clients)
        ]
        watching = asyncio.create_task(watch.keep())
        killing = asyncio.create_task(
            watch.kill_at_random(session, url, asked.kill_every, began + (until - began) * KILLED_SHARE)
        )
        telling = asyncio.create_task(_tell(tally, watch, until))
        try:
            await asyncio.gather(*(client.live(until) for client in clients))
            await killing
            seconds = time.monotonic() - began
            rest = await _come_to_rest(watch)
            open_requests = await _open_requests(session, url)
        finally:
            for task in (watching, killing, telling):
                task.cancel()
            await asyncio.gather(watching, killing, telling, return_exceptions=True)
    return [
        *_answer_lines(tally, seconds),
        *_fault_lines(tally, watch),
        *_worker_lines(watch),
        *_rest_lines(rest, open_requests),
        *_memory_lines(watch, asked.warm_up, asked.growth_mib),
    ]


async def _tell(tally: Tally, watch: Watch, until: float) -> None:
    while True:
        await asyncio.sleep(30)
        say(
            f"{until - time.monotonic():.0f} s to go: {tally.ends.total()} requests, worker killed {len(watch.away)} "
            f"times, {len(tally.unequal)} unequal, {len(tally.foreign)} foreign words"
        )


async def _come_to_rest(watch: Watch) -> dict[str, Any] | None:
    """The worker's figures once nothing runs, waits or is to be verified; as they are after too long."""
    deadline = time.monotonic() + REST_SECONDS
    while True:
        figures = await asyncio.to_thread(watch.ask)
        if figures and not (
            figures["requests_running"] or figures["requests_waiting"] or figures["verify"]["pending"]
        ):
            return figures
        if time.monotonic() > deadline:
            return figures
        await asyncio.sleep(PERIOD_SECONDS)


async def _open_requests(session: aiohttp.ClientSession, url: str) -> float:
    async with session.get(f"{url}/metrics") as response:
        found = re.findall(
            r"^prefixd_gateway_open_requests(?:\{.*\})? (\S+)$", await response.text(), re.MULTILINE
        )
    return sum(map(float, found)) if found else float("nan")


def _answer_lines(tally: Tally, seconds: float) -> list[Line]:
    return [
        Line("requests", tally.ends.total()),
        Line("requests a second", f"{tally.ends.total() / seconds:.2f}"),
        Line("answered / hung up on", f"{tally.ends['answered']} / {tally.ends['hung up']}"),
        Line("outcomes", ", ".join(f"{name} {count}" for name, count in sorted(tally.outcomes.items()))),
        Line("answers with the client's own word", tally.echoed, bad=not tally.echoed),
        Line("foreign words", _first(tally.foreign), bad=bool(tally.foreign)),
        Line("answers compared with cache-off", f"{tally.compared} whole, {tally.compared_cut} cut short"),
        Line("unequal", _first(tally.unequal), bad=bool(tally.unequal) or not tally.compared),
    ]


def _fault_lines(tally: Tally, watch: Watch) -> list[Line]:
    """Failures, of which only those are none of ours that a killed worker explains."""
    failed = [seen for seen in tally.failures if seen.end == "failed"]
    unexplained = [seen for seen in failed if not any(away.touches(seen.began, seen.ended) for away in watch.away)]
    heard = [
        seen.ended - away.killed
        for away in watch.away
        for seen in failed
        if seen.began < away.killed <= seen.ended
    ]
    back = [away.back - away.killed for away in watch.away]
    hung, cut = ([seen for seen in tally.failures if seen.end == end] for end in ("hung", "cut off"))
    return [
        Line("worker killed", f"{len(back)} times, back after {_span(back)}"),
        Line("open requests that a kill failed", f"{len(heard)}, told after {_span(heard)}", bad=_late(heard)),
        Line("failed while the worker was away", len(failed) - len(unexplained) - len(heard)),
        Line("failed for no such reason", _first([seen.error for seen in unexplained]), bad=bool(unexplained)),
        Line("hung", _first(_errors(hung)), bad=bool(hung)),
        Line("broken off without an end", _first(_errors(cut)), bad=bool(cut)),
    ]


def _worker_lines(watch: Watch) -> list[Line]:
    """Counters of all workers together, each as it was last seen."""
    every = list(watch.workers.values())

    def total(*path: str) -> int:
        return sum(_at(figures, path) for figures in every)

    hits = sum(n for figures in every for name, n in figures["lookups"].items() if not name.startswith("miss"))
    stale = sum(sum(figures["stale_drops"].values()) for figures in every)
    verified, skipped = total("verify", "verified"), total("verify", "skipped")
    return [
        Line("prompt tokens restored / computed", f"{_restored(every)} / {total('cache_tokens', 'computed')}"),
        Line("hits", hits, bad=not hits),
        Line("hits verified / skipped", f"{verified} / {skipped}", bad=not verified),
        Line("hits with other bits", total("verify", "mismatched"), bad=total("verify", "mismatched") > 0),
        Line("stale drops", stale, bad=stale > 0),
        Line("snapshots committed", total("commits")),
    ]


def _rest_lines(rest: dict[str, Any] | None, open_requests: float) -> list[Line]:
    """What must be nothing at the end."""
    if rest is None:
        return [Line("the worker at the end", "does not answer", bad=True)]
    slots = {name: rest["slots"][name] for name in ("reserved", "writing", "restoring", "evicting")}
    unowned = rest["kv_bytes_used"] - (rest["snapshot_bytes"] - rest["snapshots"] * rest["state_bytes"])
    left = {
        "running": rest["requests_running"],
        "waiting": rest["requests_waiting"],
        "open in the gateway": open_requests,
        "to be verified": rest["verify"]["pending"],
        **{f"slots {name}": count for name, count in slots.items()},
        "KV bytes nobody owns": unowned,
    }
    return [Line(f"at the end: {name}", f"{count:g}", bad=count != 0) for name, count in left.items()]


def _memory_lines(watch: Watch, warm_up: float, growth_mib: float) -> list[Line]:
    lines = []
    for role in watch.memory:
        slope, seconds = watch.slope(role, warm_up)
        grown = slope * seconds / 3600
        text = f"{watch.last_mib(role):.0f} MiB, {slope:+.1f} MiB an hour ({grown:+.1f} MiB over {seconds:.0f} s)"
        lines.append(Line(f"memory of the {role}", text, bad=grown > growth_mib or not seconds))
    return lines


def _log_lines(log: str) -> list[Line]:
    faults = [line for line in _FAULT.findall(log) if _LOST not in line]
    return [Line("faults in the log", _first(faults), bad=bool(faults))]


def render(lines: Sequence[Line]) -> str:
    """One table, violations marked."""
    width = max(len(line.name) for line in lines)
    return "\n".join(f"{line.name:<{width}}  {'VIOLATION  ' if line.bad else ''}{line.value}" for line in lines)


def _at(figures: dict[str, Any], path: Sequence[str]) -> int:
    value: Any = figures
    for name in path:
        value = value[name]
    return int(value)


def _restored(every: Sequence[dict[str, Any]]) -> int:
    return sum(n for figures in every for source, n in figures["cache_tokens"].items() if source != "computed")


def _late(heard: Sequence[float]) -> bool:
    return max(heard, default=0.0) > ERROR_SECONDS


def _errors(seen: Sequence[Seen]) -> list[str]:
    return [each.error for each in seen]


def _first(found: Sequence[str]) -> str:
    """How many there are, and the first of them."""
    return f"{len(found)}: {found[0]}" if found else "0"


def _span(seconds: Sequence[float]) -> str:
    return f"{min(seconds):.1f} to {max(seconds):.1f} s" if seconds else "-"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--kv-memory", default="256MiB", metavar="SIZE", help="default: %(default)s")
    parser.add_argument("--flags", default="", help="further flags of prefixd serve")
    parser.add_argument("--clients", type=int, default=CLIENTS, metavar="N", help="default: %(default)d")
    for name, default, what in (
        ("minutes", 10, "of the whole run"),
        ("kill-every", 60, "seconds between two kills of the worker in the mean"),
        ("deadline", 120, "seconds that one request may take"),
        ("warm-up", 30, "seconds of a process before its memory counts"),
        ("growth-mib", 32, "most that a process may grow by"),
    ):
        help_text = f"{what}; default: %(default)g"
        parser.add_argument(f"--{name}", type=float, default=float(default), metavar="N", help=help_text)
    return parser


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
