"""A worker without a model that answers control commands over a real socket."""

import threading
from dataclasses import replace

import zmq

from protocol.codec import decode, encode
from protocol.control import Difference, Explanation, Removed, Side, SlotInfo, Stats, StoredInfo, TreeNode
from protocol.messages import Reply
from protocol.rundir import CONTROL_SOCKET, prepare_run_dir, socket_address


def slot_info(slot, parent=None, tokens=100, **changes):
    row = SlotInfo(
        slot=slot,
        state="ready",
        generation=1,
        digest=f"{slot:08x}",
        tenant="",
        kind="message",
        tokens=tokens,
        messages=2,
        blocks=4,
        own_bytes=1 << 20,
        total_bytes=3 << 20,
        pinned=False,
        busy=0,
        hits=5,
        created_age_seconds=90.0,
        used_age_seconds=2.5,
        parent_slot=parent,
        children=0,
    )
    return replace(row, **changes)


def stored_info(digest, **changes):
    row = StoredInfo(
        name=digest * 4,
        state="stored",
        digest=digest,
        tenant="",
        kind="message",
        tokens=400,
        messages=3,
        own_bytes=1 << 20,
        total_bytes=4 << 20,
        pinned=False,
        busy=0,
        hits=0,
        used_age_seconds=7200.0,
        tiers=["disk"],
        exact=True,
    )
    return replace(row, **changes)


def tree_node(slot, parent=None, *, level, pinned=False, busy=0):
    return TreeNode(slot, parent, level, f"{slot:08x}", "message", 100 * slot, 2, 5, pinned, busy)


STATS = Stats(
    epoch="e1",
    phase="ready",
    model="tiny",
    uptime_seconds=7200.0,
    slots={"free": 9, "ready": 3},
    snapshots=3,
    snapshot_bytes=5 << 20,
    kv_blocks_total=100,
    kv_blocks_free=40,
    kv_bytes_total=1 << 30,
    kv_bytes_used=600 << 20,
    lookups={"hit/none": 4, "partial/evicted": 1, "miss/cold": 2, "miss/diverged": 0},
    cache_tokens={"computed": 300, "device": 700},
    commits=6,
    aborts={},
    evictions={"space": 1},
    stale_drops={"tokens": 0},
    requests_running=1,
    requests_waiting=0,
    requests={"finished": 5},
)
EXPLANATION = Explanation(
    request_id="r1",
    age_seconds=3.0,
    outcome="miss",
    reason="diverged",
    depth=0,
    prompt_tokens=900,
    boundaries=4,
    slot=None,
    deepest_known=600,
    diverged_message=2,
    diverged_token=640,
    committed=[640, 880],
    state="finished",
    completion_tokens=12,
    queue_seconds=0.001,
    prefill_seconds=0.25,
    decode_seconds=0.5,
)


class FakeWorker:
    """Slots 1 to 3 in a fork, of which 3 is busy, and as many more as a test adds."""

    def __init__(self, run_dir):
        prepare_run_dir(run_dir)
        self.asked = []
        self.slots = {1: slot_info(1, tokens=100), 2: slot_info(2, 1, 200), 3: slot_info(3, 1, 300, busy=1)}
        self.nodes = [
            tree_node(1, level=0),
            tree_node(2, 1, level=1, busy=1),
            tree_node(3, 1, level=1, pinned=True),
        ]
        self.stored_rows = {}
        self.page = 2
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(socket_address(run_dir, CONTROL_SOCKET))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self):
        self._over.set()
        self._thread.join()
        self._context.destroy()

    def _serve(self):
        while not self._over.is_set():
            if self._socket.poll(10):
                sender, *frames = self._socket.recv_multipart()
                command = decode(frames)
                self.asked.append((command.verb, command.args))
                try:
                    reply = Reply("e1", command.command_id, getattr(self, command.verb)(**command.args))
                except KeyError as error:
                    reply = Reply("e1", command.command_id, error=f"no such slot or request: {error}")
                self._socket.send_multipart([sender, *encode(reply)])

    def stats(self):
        return STATS

    def list(self, cursor, limit):
        rows = [row for slot, row in sorted(self.slots.items()) if slot >= cursor]
        following = rows[self.page].slot if len(rows) > self.page else None
        return {"slots": rows[: self.page], "next_cursor": following, "total": len(self.slots)}

    def stored(self, cursor, limit, tier=None):
        rows = [row for name, row in sorted(self.stored_rows.items()) if name >= cursor]
        rows = [row for row in rows if (row.slot is None if tier is None else tier in row.tiers)]
        following = rows[self.page].name if len(rows) > self.page else None
        return {"stored": rows[: self.page], "next_cursor": following, "total": len(rows)}

    def show(self, slot=None, name=""):
        return self.slots[slot] if name == "" else self.stored_rows[name]

    def tree(self, stored):
        return {"nodes": self.nodes}

    def explain(self, request_id):
        return {"r1": EXPLANATION}[request_id]

    def diff(self, a, b):
        sides = {1: Side(1, "", 100, 2, 30, [80, 100]), "r1": Side(None, "", 90, 3, 20, [90])}
        return Difference(70, 60, 1, sides[a], sides[b])

    def evict(self, slots, dry_run, generations=None, names=(), tier=None):
        rows = [self.slots[slot] for slot in slots]
        if generations is not None:
            rows = [row for row, then in zip(rows, generations, strict=True) if row.generation == then]
        gone = [row.slot for row in rows if not row.busy]
        kept = [name for name in names if self.stored_rows[name].pinned]
        names = [name for name in names if name not in kept]
        tier_bytes = sum(self.stored_rows[name].own_bytes for name in names)
        busy = [row.slot for row in rows if row.busy]
        return Removed(gone, busy, len(gone) << 20, dry_run, tier_bytes, len(names), names, kept)

    def flush(self, dry_run):
        return self.evict(list(self.slots), dry_run)

    def pin(self, slot=None, name=""):
        return replace(self.show(slot, name), pinned=True)

    def unpin(self, slot=None, name=""):
        return self.show(slot, name)
