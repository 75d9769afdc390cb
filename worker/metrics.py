"""Prometheus metrics of the worker. Counters are counted where things happen, gauges are read at scrape time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protocol.messages import FailureCode, Outcome, Reason
from worker.grammars import Source
from worker.sequences import Request, State
from worker.steps import Decode, Prefill, Step

_PARTIAL_REASONS = (
    "evicted",
    "flushed",
    "not_kept",
    "longer_than_prompt",
    "stale",
    "fingerprint",
    "restore_failed",
)
_NOT_RESTORED = ("none",)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
_SHORT_SECONDS = (0.00001, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25)
_TIMED: Mapping[type[Step], str] = {Prefill: "prefill", Decode: "decode"}
CANCEL_CAUSES = ("disconnect", "shutdown", "gateway_lost")

disable_created_metrics()  # type: ignore[no-untyped-call]  # a start time for each helps nobody


def reasons_of(outcome: Outcome) -> tuple[str, ...]:
    """The reasons that can go with an outcome."""
    if outcome == "hit":
        return _NOT_RESTORED
    if outcome == "partial":
        return _PARTIAL_REASONS
    return tuple(reason for reason in get_args(Reason) if reason not in _NOT_RESTORED)


class WorkerMetrics:
    """The registry of one worker. Every label combination is there at 0 from the start."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, **labels: Iterable[str]) -> Counter:
            made = Counter(f"prefixd_{name}", text, list(labels), registry=self.registry)
            for label, values in labels.items():
                for value in values:
                    made.labels(**{label: value})
            return made

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"prefixd_{name}_seconds", text, buckets=buckets, registry=self.registry)

        self.lookups = Counter(
            "prefixd_cache_lookups",
            "Requests by what the lookup found and why",
            ["outcome", "reason"],
            registry=self.registry,
        )
        for outcome in get_args(Outcome):
            for reason in reasons_of(outcome):
                self.lookups.labels(outcome=outcome, reason=reason)
        self.cache_tokens = counter(
            "cache_tokens",
            "Prompt tokens by where their state came from",
            source=("computed", "device", "host", "disk"),
        )
        self.grammars = counter(
            "grammars",
            "Requests with a grammar by where that came from: kept from another one, compiled, or refused",
            source=get_args(Source),
        )
        self.inexact_hits = Counter(
            "prefixd_inexact_hits",
            "Requests that started from what was computed with other numerics, as foreign_numerics lets them",
            registry=self.registry,
        )
        self.requests = counter(
            "requests",
            "Requests by how they ended",
            result=("finished", "cancelled", "failed", *(f"refused_{code}" for code in get_args(FailureCode))),
        )
        self.cancellations = counter("cancellations", "Cancelled requests by cause", cause=CANCEL_CAUSES)
        self.failures = counter("failures", "Failed requests by cause", cause=get_args(FailureCode))
        self.absorbed_tokens = Counter(
            "prefixd_absorbed_tokens",
            "Tokens computed in idle time so that an answer need not be computed in the next turn",
            registry=self.registry,
        )
        self.verifications = counter(
            "hit_verifications",
            "Hits computed again from nothing, by result",
            result=("verified", "mismatched", "skipped"),
        )
        self.swaps = counter("swaps", "Choices moved to host memory and back", direction=("out", "in"))
        self.generated_tokens = Counter(
            "prefixd_generated_tokens", "Tokens sampled, stop tokens included", registry=self.registry
        )
        self.queue_seconds = histogram("queue", "From arrival to admission", _SECONDS)
        self.prefill_seconds = Histogram(
            "prefixd_prefill_seconds",
            "From admission to the first token",
            ["outcome"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        for outcome in get_args(Outcome):
            self.prefill_seconds.labels(outcome=outcome)
        self.step_seconds = Histogram(
            "prefixd_step_seconds",
            "Engine steps by kind",
            ["kind"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        for kind in _TIMED.values():
            self.step_seconds.labels(kind=kind)
        self.restore_seconds = histogram("restore", "Taking a snapshot into a sequence", _SHORT_SECONDS)
        self.commit_seconds = histogram("commit", "Publishing a snapshot", _SHORT_SECONDS)

    def timed(self, step: Step) -> AbstractContextManager[object]:
        """While a step runs: how long it takes is counted for some kinds."""
        kind = _TIMED.get(type(step))
        return nullcontext() if kind is None else self.step_seconds.labels(kind=kind).time()

    def count_lookup(
        self, outcome: Outcome, reason: Reason, depth: int, sources: Mapping[str, int], *, exact: bool = True
    ) -> None:
        """One request was looked up; of `depth` tokens `sources` came from slower tiers, the rest was on the device."""
        self.lookups.labels(outcome=outcome, reason=reason).inc()
        self.cache_tokens.labels(source="device").inc(depth - sum(sources.values()))
        for source, tokens in sources.items():
            self.cache_tokens.labels(source=source).inc(tokens)
        if not exact:
            self.inexact_hits.inc()

    def count_prefill(self, request: Request) -> None:
        assert request.admitted_at is not None
        assert request.prefilled_at is not None
        elapsed = request.prefilled_at - request.admitted_at
        self.prefill_seconds.labels(outcome=request.outcome).observe(elapsed)

    def count_end(self, request: Request, state: State, cause: str) -> None:
        """One request ended."""
        self.requests.labels(result=state).inc()
        self.generated_tokens.inc(request.generated)
        if state == "cancelled":
            self.cancellations.labels(cause=cause).inc()
        elif state == "failed":
            self.failures.labels(cause=cause).inc()

    def exposition(self) -> str:
        return generate_latest(self.registry).decode()

    def values(self, metric: Counter, *labels: str) -> dict[str, int]:
        """Current values of a counter by its label values joined with a slash."""
        return {
            "/".join(sample.labels[label] for label in labels): int(sample.value)
            for family in metric.collect()
            for sample in family.samples
            if sample.name.endswith("_total")
        }


class StateCollector(Collector):
    """Gauges and counters whose truth lies in the store and the scheduler; read when scraped."""

    # name -> (help, label or "", value by label value)
    Families = Mapping[str, tuple[str, str, Mapping[str, float]]]

    def __init__(self, gauges: Callable[[], Families], counters: Callable[[], Families]) -> None:
        self._gauges = gauges
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        for name, (text, label, values) in self._gauges().items():
            gauge = GaugeMetricFamily(name, text, labels=[label] if label else [])
            for value, number in values.items():
                gauge.add_metric([value] if label else [], number)
            yield gauge
        for name, (text, label, values) in self._counters().items():
            counter = CounterMetricFamily(name, text, labels=[label] if label else [])
            for value, number in values.items():
                counter.add_metric([value] if label else [], number)
            yield counter
