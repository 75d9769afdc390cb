"""Answers to the operator's verbs (`protocol/control.py`), given between steps. Reading never touches recency."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, replace
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
from worker.tiers.stored import find_stored, list_stored, stored_info
from worker.tiers.tiers import Tiers
from worker.tiers.transfer import TransferRefused

log = logging.getLogger(__name__)

_PAGE = 100
_RECENT_REQUESTS = 50
_EVENTS = 500  # in one answer
_READING = ("metrics", "stats", "list", "stored", "show", "tree", "explain", "diff", "recent", "events")


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
            case "stored":
                return self._stored(args)
            case "show":
                return self._shown(args)
            case "tree":
                nodes = snapshot_tree(store, stored=bool(args.get("stored", False)))
                return {"nodes": [asdict(node) for node in nodes]}
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
            case "pin" | "unpin" if "name" in args:
                self._pin_stored(self._named(args), pinned=verb == "pin")
                return self._shown(args)
            case "pin":
                slot = self._to_pin(args)
                self._clearing.pin(slot)
                return asdict(slot_info(store, slot))
            case "unpin":
                self._clearing.unpin(_integer(args, "slot"))
                return asdict(slot_info(store, _integer(args, "slot")))
            case "export" | "import" | "transfer":
                return asdict(self._transfer(verb, args))
            case _:
                raise Refused(f"unknown verb {verb}")

    def _transfer(self, verb: str, args: dict[str, Any]) -> Transferred:
        """Snapshots to or from a folder on this machine."""
        transfers = self._tiers.transfers if self._tiers else None
        if transfers is None:
            raise Refused(f"{verb} needs a disk cache: start the worker with --disk-cache")
        if verb == "transfer":
            return transfers.answer()
        folder = args.get("folder")
        if not isinstance(folder, str) or not Path(folder).is_absolute():
            raise Refused("folder: must be an absolute path")
        if verb == "import":
            return transfers.import_from(Path(folder))
        nodes = [self._store.known(slot).node for slot in _integers(args, "slots")]
        names = self._by_name(args)
        if len(names) < len(set(args.get("names", []))):
            raise Refused("some of it is not stored any more")
        nodes += names.values()
        return transfers.export(nodes, Path(folder))

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
        dry_run, tier = bool(args.get("dry_run", False)), self._tier(args)
        named, going, kept = self._by_name(args), {}, []
        for name, node in named.items():
            if tier is None and node.slot is not None:
                continue  # it has come to the device since it was chosen
            assert self._tiers is not None, "or nothing had a name"
            if node.pinned or self._tiers.is_busy(node):
                kept.append(name)
            else:
                going[name] = node
        if tier is None:
            removed = self._clearing.evict(slots, dry_run, generations, list(going.values()))
        else:
            assert self._tiers is not None, "or it had no name either"
            freed = self._tiers.evict(list(going.values()), dry_run=dry_run, tier=tier)
            removed = Removed([], [], 0, dry_run, freed, len(going))
        return replace(removed, names=list(going), kept=kept)

    # What only slower tiers have

    def _stored(self, args: dict[str, Any]) -> dict[str, Any]:
        cursor, limit, tier = args.get("cursor", ""), _integer(args, "limit", _PAGE), self._tier(args)
        if not isinstance(cursor, str):
            raise Refused("cursor: must be a string")
        if self._tiers is None:
            return {"stored": [], "next_cursor": None, "total": 0}
        rows, following, total = list_stored(self._tiers, cursor, limit, tier)
        return {"stored": [asdict(row) for row in rows], "next_cursor": following, "total": total}

    def _shown(self, args: dict[str, Any]) -> dict[str, Any]:
        if "name" not in args:
            return asdict(slot_info(self._store, _integer(args, "slot")))
        node = self._named(args)
        assert self._tiers is not None, "or nothing had a name"
        return asdict(stored_info(self._tiers, node))

    def _named(self, args: dict[str, Any]) -> Node:
        name = args.get("name")
        found = self._by_name({"names": [name]})
        if not found:
            raise Refused(f"nothing is stored under the name {name}")
        return found[str(name)]

    def _pin_stored(self, node: Node, *, pinned: bool) -> None:
        assert self._tiers is not None, "or nothing had a name"
        if pinned and not self._tiers.can_restore(node):
            raise Refused("it cannot be restored from where it is stored: see its state")
        self._store.index.pin(node, pinned=pinned)

    def _by_name(self, args: dict[str, Any]) -> dict[str, Node]:
        """As far as they are known."""
        names = args.get("names", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise Refused("names: must be strings")
        return find_stored(self._tiers, names) if names and self._tiers else {}

    def _tier(self, args: dict[str, Any]) -> str | None:
        """The one that is asked about."""
        tier = args.get("tier")
        there = [each.ledger.tier for each in self._tiers.tiers] if self._tiers else []
        if tier is not None and tier not in there:
            raise Refused("tier: this worker has no such tier: see its settings host_memory and disk_cache")
        return tier

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
