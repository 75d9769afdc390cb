"""Answers to the operator's verbs (`protocol/control.py`), given between steps. Reading never touches recency."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from protocol.control import Removed, Stats, Transferred, Verifications
from protocol.messages import Command, ModelInfo, Reply
from worker.block_pool import BlockPool
from worker.difference import difference
from worker.journal import Journal
from worker.metrics import WorkerMetrics
from worker.scheduler import Scheduler
from worker.snapshot_clearing import Clearing
from worker.snapshot_index import Node
from worker.snapshot_view import list_slots, slot_info, snapshot_tree
from worker.snapshots import SnapshotStore, UnknownSlot
from worker.tiers.tiers import Tiers
from worker.tiers.transfer import TransferRefused, export_snapshots, import_snapshots

log = logging.getLogger(__name__)

_PAGE = 100
_RECENT_REQUESTS = 50
_EVENTS = 500  # in one answer
_READING = ("metrics", "stats", "list", "show", "tree", "explain", "diff", "recent", "events")


class Refused(Exception):
    """A command that cannot be carried out; the text goes to the operator."""


class Control:
    """Carries out control commands on the engine's thread."""

    def __init__(
        self,
        *,
        model: ModelInfo,
        model_name: str,
        block_bytes: int,
        scheduler: Scheduler,
        store: SnapshotStore,
        pool: BlockPool,
        metrics: WorkerMetrics,
        journal: Journal,
        tiers: Tiers | None = None,
    ) -> None:
        self._model = model
        self._model_name = model_name
        self._block_bytes = block_bytes
        self._scheduler = scheduler
        self._store = store
        self._clearing = Clearing(store)
        self._pool = pool
        self._metrics = metrics
        self._journal = journal
        self._tiers = tiers
        self._started = time.monotonic()

    def answer(self, command: Command) -> Reply:
        """Raises what went wrong of its own accord where state was to change: it cannot be relied on any more."""
        epoch = self._scheduler.epoch
        try:
            return Reply(epoch, command.command_id, self._data(command.verb, command.args))
        except (Refused, UnknownSlot, TransferRefused) as error:
            return Reply(epoch, command.command_id, error=str(error))
        except Exception as error:
            if command.verb not in _READING:
                raise
            log.exception("cannot answer %s", command.verb)
            return Reply(epoch, command.command_id, error=f"{type(error).__name__} in the worker")

    def _data(self, verb: str, args: dict[str, Any]) -> object:
        store = self._store
        match verb:
            case "metrics":
                return {"text": self._metrics.exposition()}
            case "stats":
                return asdict(self._stats())
            case "list":
                cursor, limit = _integer(args, "cursor", 0), _integer(args, "limit", _PAGE)
                slots, following, total = list_slots(store, cursor, limit)
                return {"slots": [asdict(slot) for slot in slots], "next_cursor": following, "total": total}
            case "show":
                return asdict(slot_info(store, _integer(args, "slot")))
            case "tree":
                return {"nodes": [asdict(node) for node in snapshot_tree(store)]}
            case "explain":
                request_id = args.get("request_id")
                if not isinstance(request_id, str):
                    raise Refused("request_id: must be a string")
                explanation = self._journal.explain(request_id)
                if explanation is None:
                    raise Refused(f"request {request_id} is unknown or too long ago")
                return asdict(explanation)
            case "diff":
                return asdict(difference(self._conversation(args, "a"), self._conversation(args, "b")))
            case "recent":
                limit = _integer(args, "limit", _RECENT_REQUESTS)
                return {"requests": [asdict(each) for each in self._journal.recent(limit)]}
            case "events":
                after = _integer(args, "after") if "after" in args else None
                limit = min(_integer(args, "limit", _EVENTS), _EVENTS)
                return asdict(store.events.page(self._scheduler.epoch, after, limit))
            case "evict":
                return asdict(self._evict(args))
            case "verify":
                background = self._scheduler.background
                return asdict(
                    Verifications(
                        background.verified,
                        background.mismatched,
                        background.skipped,
                        background.pending_verifications,
                    )
                )
            case "flush":
                return asdict(self._clearing.flush(dry_run=bool(args.get("dry_run", False))))
            case "pin":
                slot = self._to_pin(args)
                self._clearing.pin(slot)
                return asdict(slot_info(store, slot))
            case "unpin":
                self._clearing.unpin(_integer(args, "slot"))
                return asdict(slot_info(store, _integer(args, "slot")))
            case "export" | "import":
                return asdict(self._transfer(verb, args))
            case _:
                raise Refused(f"unknown verb {verb}")

    def _transfer(self, verb: str, args: dict[str, Any]) -> Transferred:
        """Snapshots to or from a folder on this machine."""
        disk = self._tiers.disk if self._tiers else None
        if disk is None:
            raise Refused(f"{verb} needs a disk cache: start the worker with --disk-cache")
        folder = args.get("folder")
        if not isinstance(folder, str) or not Path(folder).is_absolute():
            raise Refused("folder: must be an absolute path")
        if verb == "import":
            if disk.is_writing:
                raise Refused("snapshots are being written: try again in a moment")
            return import_snapshots(disk, Path(folder))
        nodes = [self._store.known(slot).node for slot in _integers(args, "slots")]
        return export_snapshots(disk, nodes, Path(folder), recurs=self._store.states is not None)

    def _conversation(self, args: dict[str, Any], name: str) -> Node:
        """The node that a slot number or a request id stands for."""
        asked = args.get(name)
        if type(asked) is int:
            snapshot = self._store.known(asked)
            if snapshot.leaving:
                raise Refused(f"slot {asked} is being cleared")
            return snapshot.node
        if not isinstance(asked, str):
            raise Refused(f"{name}: must be a slot or a request id")
        return self._reached(asked)

    def _reached(self, request_id: str) -> Node:
        """The deepest boundary that a request has reached."""
        place = self._journal.place(request_id)
        if place is None:
            raise Refused(f"request {request_id} is unknown or too long ago")
        node = self._store.index.find(place.tenant, place.digest)
        if node is None:
            raise Refused(f"nothing is known any more of what request {request_id} has computed")
        return node

    def _evict(self, args: dict[str, Any]) -> Removed:
        slots, generations = _integers(args, "slots"), None
        if "generations" in args:
            numbers = _integers(args, "generations")
            if len(numbers) != len(slots):
                raise Refused("generations: must be one a slot")
            generations = dict(zip(slots, numbers, strict=True))
        return self._clearing.evict(slots, bool(args.get("dry_run", False)), generations)

    def _to_pin(self, args: dict[str, Any]) -> int:
        """The slot itself, or that of what a request has left: of its head, or of the deepest boundary it reached."""
        request_id = args.get("request_id")
        if request_id is None:
            return _integer(args, "slot")
        if not isinstance(request_id, str):
            raise Refused("request_id: must be a string")
        node = self._reached(request_id)
        if args.get("head", False):
            heads = (n for n in (node, *node.ancestors()) if n.kind == "head" and n.slot is not None)
            node = next(heads, node)
            if node.kind != "head":
                raise Refused(f"no snapshot is kept of the system message of request {request_id}")
        if node.slot is None:
            raise Refused(f"no snapshot is kept of the prompt of request {request_id}: no room, or no use")
        return node.slot

    def _stats(self) -> Stats:
        store, pool, metrics = self._store, self._pool, self._metrics
        states = store.slot_states()
        return Stats(
            epoch=self._scheduler.epoch,
            phase="ready",
            model=self._model_name,
            uptime_seconds=time.monotonic() - self._started,
            slots=states,
            snapshots=store.snapshot_count,
            snapshot_bytes=store.snapshot_bytes,
            kv_blocks_total=pool.total_count,
            kv_blocks_free=pool.free_count,
            kv_bytes_total=pool.total_count * self._block_bytes,
            kv_bytes_used=pool.used_count * self._block_bytes,
            states_total=store.states.total_count if store.states else 0,
            states_free=store.states.free_count if store.states else 0,
            state_bytes=store.state_bytes,
            lookups=metrics.values(metrics.lookups, "outcome", "reason"),
            cache_tokens=metrics.values(metrics.cache_tokens, "source"),
            commits=store.commits,
            aborts=dict(store.aborts),
            evictions=dict(store.evictions),
            stale_drops=dict(store.stale_drops),
            requests_running=self._scheduler.running_count,
            requests_waiting=len(self._scheduler.waiting),
            requests=metrics.values(metrics.requests, "result"),
            tiers=self._tiers.infos() if self._tiers else [],
            tier_pending=self._tiers.pending if self._tiers else 0,
            tier_failures=self._tiers.failures() if self._tiers else {},
        )


def _integers(args: dict[str, Any], name: str) -> list[int]:
    values = args.get(name)
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise Refused(f"{name}: must be a list of integers")
    return values


def _integer(args: dict[str, Any], name: str, default: int | None = None) -> int:
    value = args.get(name, default)
    if type(value) is not int or value < 0:
        raise Refused(f"{name}: must be an integer of at least 0")
    return value
