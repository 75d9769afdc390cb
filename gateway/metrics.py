"""Prometheus metrics of the gateways. The worker has its own; `/metrics` shows both."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from gateway.seats import Seat, Totals
from gateway.worker_client import WorkerClient
from protocol.messages import Outcome

ROUTES = (
    "health",
    "ready",
    "metrics",
    "root",
    "openapi",
    "models",
    "chat",
    "completions",
    "responses",
    "messages",
    "count_tokens",
    "input_tokens",
    "ui",
    "ui_events",
    "other",
)
# 499: the client hung up before there was an answer
STATUSES = (200, 400, 401, 403, 404, 405, 408, 413, 429, 499, 500, 503, 529)
_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 60, 120, 300)
_TOKEN_SECONDS = (0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5)
_SHORT_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5, 20)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a start time for each helps nobody


class GatewayMetrics:
    """What one gateway counts, and the registry that shows what all gateways of its run directory have counted.

    Every label combination is there at 0 from the start.
    """

    def __init__(self, run_dir: Path) -> None:
        """Takes a seat until `close`; raises what that raises."""
        self.seat = Seat(run_dir)
        self._client: WorkerClient | None = None
        self.registry = CollectorRegistry()
        self.registry.register(Totals(self.seat))
        # Each gateway's own view: it adds up to nothing.
        self.worker_up = Gauge("prefixd_worker_up", "1 while the worker takes requests", registry=self.registry)
        with self.seat.writing_through():
            self._define()

    def _define(self) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"prefixd_{name}", text, registry=None)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"prefixd_{name}", text, multiprocess_mode="livesum", registry=None)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"prefixd_{name}", text, buckets=buckets, registry=None)

        self.http_requests = Counter(
            "prefixd_http_requests",
            "HTTP answers by route and status; 499 is a client that hung up before there was one",
            ["route", "status"],
            registry=None,
        )
        for route in ROUTES:
            for status in STATUSES:
                self.http_requests.labels(route, str(status))
        self.ttft = Histogram(
            "prefixd_ttft_seconds",
            "From a request's arrival to its first token being sent",
            ["outcome"],
            buckets=_SECONDS,
            registry=None,
        )
        for outcome in get_args(Outcome):
            self.ttft.labels(outcome)
        self.tpot = histogram("tpot_seconds", "Mean gap between later tokens of a request", _TOKEN_SECONDS)
        self.tokenize = histogram("tokenize_seconds", "From a body to token ids and boundaries", _SHORT_SECONDS)
        self.disconnects = counter("disconnects", "Requests whose client hung up before the answer ended")
        self.absorb_faults = counter("absorb_faults", "Answers that could not be prepared for their next turn")
        self.worker_lost = counter("worker_lost_requests", "Requests that were open when the worker was lost")
        self.api_key_reads = Counter(
            "prefixd_api_key_reads",
            "Changes of the file of API keys; one that is refused leaves the keys as they were",
            ["result"],
            registry=self.registry,
        )
        for result in ("used", "refused"):
            self.api_key_reads.labels(result)
        self.open_requests = gauge("gateway_open_requests", "Requests being served")
        self.bad_frames = gauge("gateway_bad_frames", "Messages of the worker that made no sense")

    def watch(self, client: WorkerClient) -> None:
        """Count what happens to the client."""
        self.worker_up.set_function(lambda: client.why_not_ready() is None)
        client.on_lost = self.worker_lost.inc
        client.on_bad_frame = self.bad_frames.inc
        self._client = client

    def api_keys_read(self, used: bool) -> None:
        """The file of API keys has changed."""
        self.api_key_reads.labels("used" if used else "refused").inc()

    def answered(self, route: str, status: int) -> None:
        """Count an answer; a status that is not listed counts as the class it belongs to."""
        known = status if status in STATUSES else 500 if status >= 500 else 400 if status >= 400 else 200
        self.http_requests.labels(route, str(known)).inc()

    def exposition(self) -> bytes:
        """All gateways together. Reads files; safe in a thread."""
        return generate_latest(self.registry)

    def close(self) -> None:
        """Nothing is counted after this."""
        if self._client is not None:
            self._client.on_lost = self._client.on_bad_frame = None
        self.seat.close()
