"""Recorded workloads as turns in order of arrival: token ids, boundaries, and keys for blocks of fixed size.

The ids stand for the recorded ones: equal where those were equal, and nothing more. The file's name or content tells
its format, see `load`.
"""

from __future__ import annotations

import gzip
import heapq
import json
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gateway.boundaries import Cut, with_interior
from protocol.digest import chain_digests, root_digest
from protocol.messages import Boundary, BoundaryKind

MOONCAKE_BLOCK = 512
SMALL_BLOCK = 16
TURN_SECONDS = 15.0  # between two requests of a session whose times were not recorded
BREAK_SECONDS = 60.0  # between two sessions of one user
STAGGER_SECONDS = 5.0  # between the first requests of two users

_ROOT = root_digest("workload")
_PIECES = re.compile(r"\w{1,6}|[^\w\s]|\s+")
Ids = NDArray[np.int32]
Keys = NDArray[np.uint64]


class UnknownFormat(ValueError):
    """A file that cannot be played. The message names it and says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One request. `keys` name each of its full blocks of `block_tokens` tokens and all before it."""

    at: float  # seconds
    session: str
    tokens: int
    make_ids: Callable[[], Ids]  # made anew on each call: all of a trace at once would not fit
    boundaries: tuple[Boundary, ...]
    keys: Keys
    block_tokens: int

    @property
    def token_ids(self) -> array[int]:
        ids = array("i")
        ids.frombytes(self.make_ids().tobytes())
        return ids


Session = list[Turn]


def load(path: Path, users: int) -> list[Turn]:
    """All turns of a file in order of arrival. Raises `UnknownFormat`.

    - Mooncake traces have arrivals of their own, and `users` does not apply. Where messages end is not known: a
      boundary is the end of each prompt, down to full blocks (the hash of the last partial block is no name for the
      tokens that later extend it), and each place where two prompts of the trace part, as a message ended
      in the 512 tokens after it. Here and below, stretches of more than 8192 tokens are cut as long messages are.
    - Claude Code sessions and conversations: each of `users` plays one session after the other. Sessions have a
      boundary after tools and system, and where any prompt of the file ended; messages inside a turn are not known.
    - Conversations have a boundary after tools and system together and after every message. Words of up to six
      letters stand for tokens.
    """
    if ".csv" in path.suffixes:
        raise UnknownFormat(f"{path.name}: lengths and arrivals only; without contents nothing can be reused")
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    if not rows:
        raise UnknownFormat(f"{path.name}: empty")
    if "hash_ids" in rows[0]:
        return _mooncake(rows)
    if "block_size" in rows[0]:
        return _interleave(_claude_code(rows), users)
    if "messages" in rows[0]:
        return _interleave([conversation(row, _tools(row, rows[0])) for row in rows], users)
    raise UnknownFormat(f"{path.name}: neither block hashes nor messages in its first line")


def _interleave(sessions: Sequence[Session], users: int) -> list[Turn]:
    """Sessions in order, each by the user who is free first."""
    free = [(user * STAGGER_SECONDS, user) for user in range(users)]
    turns: list[tuple[float, int, Turn]] = []
    for session in sessions:
        start, user = heapq.heappop(free)
        for turn in session:
            at = start + turn.at
            turns.append((at, len(turns), Turn(at, *_after_at(turn))))
        heapq.heappush(free, (start + session[-1].at + BREAK_SECONDS, user))
    return [turn for *_, turn in sorted(turns, key=lambda item: item[:2])]


def _after_at(turn: Turn) -> tuple[Any, ...]:
    return turn.session, turn.tokens, turn.make_ids, turn.boundaries, turn.keys, turn.block_tokens


# Block traces


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A request of a block trace: an id for each full block, and how many tokens follow them."""

    at: float
    session: str
    ids: NDArray[np.int64]
    rest: int
    head: int  # blocks of tools and system; 0: not known


def _mooncake(rows: Sequence[dict[str, Any]]) -> list[Turn]:
    requests = []
    for row in rows:
        full = row["input_length"] // MOONCAKE_BLOCK
        ids = np.array(row["hash_ids"][:full], np.int64)
        requests.append(_Blocks(row["timestamp"] / 1000, "", ids, row["input_length"] % MOONCAKE_BLOCK, 0))
    return _block_turns(requests, MOONCAKE_BLOCK, partings=True)


def _claude_code(rows: Sequence[dict[str, Any]]) -> list[Session]:
    """Ids are local to a session. Tools and system are shared by sessions with equal sizes of both, all else by
    sessions whose requests were the same so far: forks."""
    known: dict[object, int] = {}
    requests: list[_Blocks] = []
    for row in rows:
        local: dict[int, int] = {}
        story: int = hash(None)
        flat: list[tuple[float, int, dict[str, Any]]] = []
        for entry in row["requests"]:
            inner = entry["requests"] if entry.get("type") == "subagent" else [entry]
            offset = entry["t"] if entry.get("type") == "subagent" else 0.0
            sizes = entry if entry.get("type") == "subagent" else row
            head = (sizes["tool_tokens"] + sizes["system_tokens"]) // row["block_size"]
            flat += [(offset + request["t"], head, request) for request in inner]
        heads = set()
        for at, head, request in sorted(flat, key=lambda item: item[0]):
            story = hash((story, head, request["in"], request["out"], at))
            ids = [first + i for first, count in request["hash_runs"] for i in range(count)]
            for place, block in enumerate(ids):
                if block not in local:
                    in_head = place < head and head not in heads
                    name = ("head", head, row["tool_tokens"], place) if in_head else (story, block)
                    local[block] = known.setdefault(name, len(known))
            heads.add(head)
            blocks = np.array([local[block] for block in ids], np.int64)
            has_head = len(blocks) > head and ("head", head, row["tool_tokens"], 0) in known
            has_head = has_head and blocks[0] == known["head", head, row["tool_tokens"], 0]
            rest = request["in"] - len(blocks) * row["block_size"]
            requests.append(_Blocks(at, row["session"], blocks, rest, head if has_head else 0))
    sessions: dict[str, Session] = {}
    for turn in _block_turns(requests, rows[0]["block_size"], partings=False):
        sessions.setdefault(turn.session, []).append(turn)
    return list(sessions.values())


def _block_turns(requests: Sequence[_Blocks], block: int, *, partings: bool) -> list[Turn]:
    keys = [_prefix_keys(request.ids) for request in requests]
    ends = {int(chain[-1]) for chain in keys if len(chain)}
    if partings:
        after: dict[int, int] = {}
        for chain in keys:
            for place, following in zip(chain[:-1].tolist(), chain[1:].tolist(), strict=True):
                if after.setdefault(place, following) != following:
                    ends.add(place)
    vocabulary = max((int(request.ids.max(initial=0)) for request in requests), default=0) + 1
    turns = []
    for number, (request, chain) in enumerate(zip(requests, keys, strict=True)):
        places = [place for place, key in enumerate(chain.tolist(), 1) if key in ends or place == request.head]
        kinds: list[tuple[int, BoundaryKind]] = [
            (place * block, "head" if place == request.head else "message") for place in places
        ]
        make = _ids_of_blocks(request.ids, block, request.rest, (vocabulary + number) * block)
        total = len(request.ids) * block + request.rest
        turns.append(Turn(request.at, request.session, total, make, _boundaries(make(), kinds), chain, block))
    return turns


def _ids_of_blocks(blocks: NDArray[np.int64], size: int, rest: int, fresh: int) -> Callable[[], Ids]:
    """`size` ids for each block, then `rest` ids from `fresh` on, which nobody else has."""

    def make() -> Ids:
        whole = (blocks[:, None] * size + np.arange(size)).ravel()
        return np.concatenate((whole, np.arange(fresh, fresh + rest))).astype(np.int32)

    return make


# Conversations


def _tools(row: dict[str, Any], first: dict[str, Any]) -> Any:
    return row["tools"] if row["tools"] or "tools_ref" not in row else first["tools"]


def conversation(row: dict[str, Any], tools: Any) -> Session:
    """The requests of one recorded session, each with its recorded history."""
    pool = [_encode(message) for message in row["messages"]]
    tool_ids = _encode(tools) if tools else np.empty(0, np.int32)
    session = []
    for number, request in enumerate(row["requests"]):
        places = [place for first, end in request["prompt"] for place in range(first, end)]
        if not places:
            continue
        parts = [tool_ids, *(pool[place] for place in places)]
        kinds: list[tuple[int, BoundaryKind]] = []
        end = len(tool_ids)
        has_system = row["messages"][places[0]]["role"] == "system"
        if len(tool_ids) and not has_system:
            kinds.append((end, "head"))
        for index, place in enumerate(places):
            end += len(pool[place])
            kinds.append((end, "head" if has_system and index == 0 else "message"))
        make = _joined([*parts, np.array(_encode({"role": "assistant"}), np.int32)])
        ids = make()
        at = request["t"] if request["t"] is not None else number * TURN_SECONDS
        keys = _prefix_keys(ids[: len(ids) // SMALL_BLOCK * SMALL_BLOCK])[SMALL_BLOCK - 1 :: SMALL_BLOCK]
        session.append(Turn(at, row["id"], len(ids), make, _boundaries(ids, kinds), keys, SMALL_BLOCK))
    return sorted(session, key=lambda turn: turn.at)


def _joined(parts: Sequence[Ids]) -> Callable[[], Ids]:
    return lambda: np.concatenate(parts)


_words: dict[str, int] = {}


def _encode(item: Any) -> Ids:
    """Ids for the text of one message or tool list. Equal pieces have equal ids, in all files."""
    text = "".join(_strings(item))
    pieces = ["\0begin", *_PIECES.findall(text), "\0end"]
    return np.array([_words.setdefault(piece, len(_words)) for piece in pieces], np.int32)


def _strings(item: Any) -> Iterator[str]:
    if isinstance(item, dict):
        for name, value in item.items():
            yield f" {name}:"
            yield from _strings(value)
    elif isinstance(item, list):
        for value in item:
            yield from _strings(value)
    elif item is not None:
        yield str(item)


# Both


def _boundaries(ids: Ids, kinds: Sequence[tuple[int, BoundaryKind]]) -> tuple[Boundary, ...]:
    data = array("i")
    data.frombytes(ids.tobytes())
    cuts = with_interior([Cut(end, kind, messages) for messages, (end, kind) in enumerate(kinds, 1)])
    digests = chain_digests(_ROOT, data, [cut.end for cut in cuts])
    return tuple(
        Boundary(cut.end, digest, cut.kind, cut.messages) for cut, digest in zip(cuts, digests, strict=True)
    )


def _prefix_keys(ids: NDArray[Any]) -> Keys:
    """For each place a number that names all ids up to it: sums of well mixed pairs of id and place."""
    with np.errstate(over="ignore"):
        mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= (np.arange(len(ids), dtype=np.uint64) + np.uint64(1)) * np.uint64(0xC2B2AE3D27D4EB4F)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return np.cumsum(mixed ^ (mixed >> np.uint64(31)), dtype=np.uint64)
