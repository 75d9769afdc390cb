"""What became of the last requests: the answers of `cachectl explain` and one log line each."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, islice
from typing import NamedTuple

from protocol.control import Explanation
from protocol.messages import FailureCode
from worker.sequences import Request

log = logging.getLogger(__name__)

REMEMBERED_REQUESTS = 10_000


class Place(NamedTuple):
    """A boundary by name; no digest where none was reached."""

    tenant: str
    digest: bytes


class Journal:
    """Open requests by id, and explanations of the last ended ones. No tokens are kept."""

    def __init__(self, limit: int = REMEMBERED_REQUESTS, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._open: dict[str, Request] = {}
        self._ended: OrderedDict[str, tuple[float, Explanation, Place]] = OrderedDict()

    def add(self, request: Request) -> None:
        self._open[request.request_id] = request

    def log_end(self, request: Request, cause: str) -> None:
        """Remember an ended request and write its line."""
        if self._open.get(request.request_id) is request:
            del self._open[request.request_id]
        explanation = self._remember(request)
        diverged = ""
        if explanation.diverged_token is not None:
            diverged = (
                f" diverged_message={explanation.diverged_message} diverged_token={explanation.diverged_token}"
            )
        log.info(
            "request=%s state=%s%s outcome=%s reason=%s depth=%d%s prompt_tokens=%d completion_tokens=%d "
            "committed=%s queue_s=%.3f prefill_s=%.3f decode_s=%.3f%s",
            explanation.request_id,
            explanation.state,
            f" cause={cause}" if cause else "",
            explanation.outcome,
            explanation.reason,
            explanation.depth,
            "" if explanation.exact else " exact=no",
            explanation.prompt_tokens,
            explanation.completion_tokens,
            ",".join(map(str, explanation.committed)) or "-",
            explanation.queue_seconds,
            explanation.prefill_seconds,
            explanation.decode_seconds,
            diverged,
        )

    def log_refusal(self, request: Request, code: FailureCode, text: str) -> None:
        """Remember a request that was never taken in, as failed, and write its line."""
        request.state, request.ended_at = "failed", request.arrived
        self._remember(request)
        what = " ".join(text.partition(":")[0].split())  # behind it may stand what the client has written
        log.info("request=%s state=refused cause=%s: %s", request.request_id, code, what)

    def _remember(self, request: Request) -> Explanation:
        explanation = self._explain(request)
        self._ended.pop(request.request_id, None)
        self._ended[request.request_id] = (request.arrived, explanation, _place(request))
        while len(self._ended) > self._limit:
            self._ended.popitem(last=False)
        return explanation

    def explain(self, request_id: str) -> Explanation | None:
        """The record of one request, open or ended; None if it is not among the last ones."""
        request = self._open.get(request_id)
        if request is not None:
            return self._explain(request)
        ended = self._ended.get(request_id)
        return replace(ended[1], age_seconds=self._clock() - ended[0]) if ended else None

    def recent(self, limit: int) -> list[Explanation]:
        """The requests that came last, open ones first, then those that ended last."""
        now = self._clock()
        open_ones = (self._explain(request) for request in reversed(self._open.values()))
        ended = (replace(each, age_seconds=now - arrived) for arrived, each, _ in reversed(self._ended.values()))
        return list(islice(chain(open_ones, ended), limit))

    def place(self, request_id: str) -> Place | None:
        """The deepest boundary that a request has computed or restored; None if it is not among the last ones."""
        request = self._open.get(request_id)
        if request is not None:
            return _place(request)
        ended = self._ended.get(request_id)
        return ended[2] if ended else None

    def _explain(self, request: Request) -> Explanation:
        now = self._clock()
        queue, prefill, decode = request.seconds(now)
        return Explanation(
            request_id=request.request_id,
            age_seconds=now - request.arrived,
            outcome=request.outcome,
            reason=request.reason,
            depth=request.depth,
            prompt_tokens=request.total,
            boundaries=len(request.message.boundaries),
            slot=request.slot,
            deepest_known=request.deepest_known,
            diverged_message=request.diverged_message,
            diverged_token=request.diverged_token,
            committed=list(request.committed),
            state=request.state,
            completion_tokens=request.generated,
            queue_seconds=queue,
            prefill_seconds=prefill,
            decode_seconds=decode,
            sources=dict(request.sources),
            exact=request.exact,
        )


def _place(request: Request) -> Place:
    reached = [boundary.digest for boundary in request.message.boundaries if boundary.end <= request.computed]
    return Place(request.message.tenant, reached[-1] if reached else b"")
