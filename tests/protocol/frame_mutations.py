"""Valid frames of every message, and what becomes of them by damage: of bits, bytes, frames, values and structure."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable
from typing import Any, get_args

from protocol.codec import encode
from protocol.digest import DIGEST_BYTES
from protocol.messages import (
    Absorb,
    Accepted,
    Boundary,
    Cancel,
    Command,
    Completed,
    Failed,
    Finished,
    Generate,
    Heartbeat,
    Hello,
    Hint,
    Mark,
    Message,
    ModelInfo,
    Progress,
    Reply,
    Sampling,
    TokenLogprob,
    Tokens,
    Vocabulary,
)

Frames = list[bytes]

VOCAB = 64  # of the model that the requests are for
_IDS = array("i", [3, 1, 4, 1, 5, 9, 2, 6])
_BOUNDARIES = (Boundary(4, b"\1" * DIGEST_BYTES, "head", 1), Boundary(7, b"\2" * DIGEST_BYTES, "message", 2))
_INFO = ModelInfo("f", "llama", "float32", "cpu", VOCAB, 4096, 30, 40, 50, 60, True)
_SAMPLING = Sampling(
    3, 0.7, 0.9, 5, 0.1, 0.2, 0.3, 1.1, {2: -1.0, 5: 3.5}, seed=7, logprobs=2, stop_token_ids=(9, 11)
)
_GRAMMAR = 'start: "a" | "b"'
_LOGPROB = TokenLogprob(3, -0.5, ((3, -0.5), (4, -1.5)))
# At least one of each kind, with all that it can carry.
SAMPLES: tuple[Message, ...] = (
    Hello("g"),
    Generate("r", _IDS, _BOUNDARIES, Sampling(2, 0.0), 1, True, "t", "m", Hint("s", (Mark(7, 300),))),
    Generate("r", _IDS, _BOUNDARIES, _SAMPLING, 2),
    Generate("r", _IDS, (), Sampling(4, grammar=_GRAMMAR)),
    Cancel("r", "disconnect", 1),
    Absorb("r", _IDS[:7], _BOUNDARIES, "t"),
    Vocabulary("61 62", (0, 1), (1,)),
    Heartbeat("e", "ready", "", 0.5, 1, 2, _INFO),
    Accepted("e", "r", "partial", 7, "evicted", 1, 5),
    Progress("e", "r", 64),
    Tokens("e", "r", 0, _IDS, (_LOGPROB,)),
    Finished("e", "r", 0, "stop", 3),
    Completed("e", "r", "hit", 7, "none", 8, 3, 0.1, 0.2, 0.3, 7),
    Failed("e", "r", "invalid", "no"),
    Command("c", "list", {"cursor": 0, "limit": 10}),
    Command("c", "diff", {"a": 0, "b": "r"}),
    Command("c", "events", {"after": 0}),
    Reply("e", "c", {"text": "x", "numbers": [1, 2.5, None]}, None),
)
assert {type(sample) for sample in SAMPLES} == set(get_args(Message))

_ENCODED = [encode(sample) for sample in SAMPLES]
_NUMBERS = (
    b"0", b"-1", b"1e308", b"1e400", b"NaN", b"Infinity", b"2147483648", b"9223372036854775808", b"1e20",
    b"18446744073709551616", b"0.1", b"-0", b"1e-400", b"4294967295", b"00", b"1" * 400,
)  # fmt: skip
_STRINGS = ("", "\0", "\ud800", "é" * 50, "x" * 5000, "__proto__", "none", "1", "ff" * DIGEST_BYTES)
_ATOMS: tuple[Any, ...] = (None, True, False, -1, 0, 1 << 31, 1 << 63, 1 << 64, 1e308, float("nan"), [], {}, [[]])


def mutated(dice: random.Random) -> Frames:
    """A valid message with one to three damages."""
    frames = list(dice.choice(_ENCODED))
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        frames = dice.choice(_DAMAGES)(frames, dice)
    return frames


def _flipped(frames: Frames, dice: random.Random) -> Frames:
    return _in_one(frames, dice, _flip)


def _cut(frames: Frames, dice: random.Random) -> Frames:
    return _in_one(frames, dice, lambda data, dice: data[: dice.randrange(len(data) + 1)])


def _spliced(frames: Frames, dice: random.Random) -> Frames:
    """Bytes of another message, or of none, come in between."""

    def splice(data: bytes, dice: random.Random) -> bytes:
        other = dice.choice(dice.choice(_ENCODED)) if dice.random() < 0.5 else dice.randbytes(dice.randint(1, 40))
        at, start = dice.randint(0, len(data)), dice.randrange(len(other) + 1)
        return data[:at] + other[start:] + data[at + dice.randint(0, 9) :]

    return _in_one(frames, dice, splice)


def _renumbered(frames: Frames, dice: random.Random) -> Frames:
    """A digit of the header becomes a number that JSON, or an int32, may not hold."""
    header = frames[0] if frames else b""
    digits = [place for place, byte in enumerate(header) if chr(byte).isdigit()]
    if not digits:
        return frames
    at = dice.choice(digits)
    return [header[:at] + dice.choice(_NUMBERS) + header[at + 1 :], *frames[1:]]


def _reordered(frames: Frames, dice: random.Random) -> Frames:
    """Frames twice, left out, exchanged, emptied, or many."""
    damage = dice.randrange(6)
    if damage == 0:
        return frames[1:] if dice.random() < 0.5 else frames[:1]
    if damage == 1:
        return [*frames, *frames]
    if damage == 2:
        return frames[::-1]
    if damage == 3:
        return [b"" if dice.random() < 0.5 else frame for frame in frames]
    if damage == 4:
        return [*frames, *[dice.randbytes(dice.randint(0, 8))] * dice.randint(1, 50)]
    return [frames[0] if frames else b"", dice.randbytes(4 * dice.randint(0, 12))]


def _restructured(frames: Frames, dice: random.Random) -> Frames:
    """Some value within the header becomes another one, or goes, or comes twice, or nests."""
    try:
        header = json.loads(frames[0]) if frames else None
    except (ValueError, RecursionError):
        return frames
    places = _places(header)
    if not places:
        return frames
    inner, key = dice.choice(places)
    if dice.random() < 0.15:
        del inner[key]
    elif dice.random() < 0.1:
        inner[key] = {"frame": dice.choice((0, 1, 2, -1)), "count": dice.choice((0, 8, 1 << 31, -1, 1 << 40))}
    else:
        inner[key] = _strange(dice, inner[key])
    if dice.random() < 0.1 and isinstance(inner, dict):
        inner[dice.choice(_STRINGS)] = 1
    try:
        return [json.dumps(header).encode(), *frames[1:]]
    except RecursionError:  # nested twice
        return frames


def _strange(dice: random.Random, value: Any) -> Any:
    """Another value: half of the time one of the same kind, which may well be let in."""
    if dice.random() < 0.5:
        if isinstance(value, str):
            return dice.choice(_STRINGS)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return dice.choice(
                (0, 1, -1, 0.5, 7, 63, 64, 255, 1 << 31, 1 << 62, -(1 << 62), 1e-300, 1e300, -1e300)
            )
        if isinstance(value, list) and value:
            return dice.choice((value[::-1], value[:1], value * 3, []))
    match dice.randrange(5):
        case 0:
            return dice.choice(_STRINGS)
        case 1:
            return [value] * dice.choice((1, 2, 300))
        case 2:
            nested: Any = value
            for _ in range(dice.choice((2, 100, 800))):
                nested = [nested] if dice.random() < 0.5 else {"a": nested}
            return nested
        case 3:
            return {dice.choice(_STRINGS): value, "frame": 1}
        case _:
            return dice.choice(_ATOMS)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container and key in it, all the way down."""
    places, pending = [], [value]
    while pending:
        inner = pending.pop()
        if isinstance(inner, dict | list):
            for key in inner if isinstance(inner, dict) else range(len(inner)):
                places.append((inner, key))
                pending.append(inner[key])
    return places


def _deep(frames: Frames, dice: random.Random) -> Frames:
    """Raw nesting around where JSON, or Python, gives up, as a value of some name."""
    depth = dice.choice((250, 900, 1000, 1020, 1023, 1030, 5000))
    opening, closing = dice.choice(((b"[", b"]"), (b'{"a":', b"}")))
    nested = opening * depth + b"1" + closing * depth
    name = dice.choice((b'"type":', b'"v":', b'"body":', b'"args":', b'"data":', b'"sampling":', b'"request_id":'))
    header = frames[0] if frames else b""
    at = header.find(name)
    if at < 0:
        return [nested, *frames[1:]]
    end = min((e for e in (header.find(b",", at), header.find(b"}", at)) if e > 0), default=len(header))
    return [header[: at + len(name)] + nested + header[end:], *frames[1:]]


def _in_one(frames: Frames, dice: random.Random, damage: Callable[[bytes, random.Random], bytes]) -> Frames:
    if not frames:
        return frames
    place = dice.randrange(len(frames))
    return [*frames[:place], damage(frames[place], dice), *frames[place + 1 :]]


def _flip(data: bytes, dice: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 8)) if damaged else 0):
        damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
    return bytes(damaged)


# Those that leave JSON whole come more often: what they make is looked at more closely.
_DAMAGES: tuple[Callable[[Frames, random.Random], Frames], ...] = (
    _flipped, _flipped, _cut, _spliced, _renumbered, _renumbered, _renumbered, _reordered,
    _restructured, _restructured, _restructured, _restructured, _restructured, _deep,
)  # fmt: skip
