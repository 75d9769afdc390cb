"""Messages to ZeroMQ frames and back: one orjson header, then one raw int32 frame for each token buffer.

Data only: nothing in a frame is code, and frames that do not match their message's type, size or version are
refused as a whole with `ProtocolError`. The header is `{"v": version, "type": name, "body": {...}}`; a token
buffer stands in the body as `{"frame": index, "count": ids}`. That `v` is an integer of the header's object holds for
every version to come: it is by this that either side can say why it does not understand the other.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, get_args

import orjson
from pydantic import TypeAdapter, ValidationError

from protocol.errors import ProtocolError, VersionMismatch
from protocol.limits import MAX_FRAMES, MAX_HEADER_BYTES, MAX_PROMPT_TOKENS
from protocol.messages import PROTOCOL_VERSION, Message

_TYPES: dict[str, type] = {kind.__name__: kind for kind in get_args(Message)}
_ID_BYTES = 4
_QUOTED = 80  # characters of what is refused, in the refusal


def encode(message: Message) -> list[bytes]:
    """The frames of one message."""
    buffers: list[bytes] = []

    def default(value: object) -> object:
        if isinstance(value, bytes):
            return value.hex()
        if isinstance(value, array):
            buffers.append(_little_endian(value).tobytes())
            return {"frame": len(buffers), "count": len(value)}
        raise TypeError(f"cannot send a {type(value).__name__}")

    header = {"v": PROTOCOL_VERSION, "type": type(message).__name__, "body": message}
    return [orjson.dumps(header, default=default, option=orjson.OPT_NON_STR_KEYS), *buffers]


def decode(frames: Sequence[bytes]) -> Message:
    """The message in `frames`. Raises `ProtocolError` for anything but a well-formed message of this version.

    For one of another version that is a `VersionMismatch`.
    """
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise ProtocolError(f"a message has 1 to {MAX_FRAMES} frames, not {len(frames)}")
    if len(frames[0]) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {len(frames[0])} bytes is over the limit of {MAX_HEADER_BYTES}")
    try:
        header = orjson.loads(frames[0])
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ProtocolError("header is not an object")
    # What a refusal quotes must be short: a header may hold megabytes, and nest deeper than Python prints.
    version, name, body = header.get("v"), header.get("type"), header.get("body")
    if type(version) is not int:
        raise ProtocolError("header has no protocol version")
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(f"protocol version {version} is not {PROTOCOL_VERSION}: upgrade both sides")
    if not isinstance(name, str) or not isinstance(body, dict):
        raise ProtocolError("header has no message type or no body")
    kind = _TYPES.get(name)
    if kind is None:
        raise ProtocolError(f"unknown message type {_shown(name)}")
    if "token_ids" in body:
        body["token_ids"] = _token_ids(body["token_ids"], frames)
    elif len(frames) > 1:
        raise ProtocolError(f"{kind.__name__} carries no token frames")
    try:
        message: Message = _adapter(kind).validate_python(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = _shown(".".join(map(str, first["loc"])))  # some of these are the sender's own words
        raise ProtocolError(f"{kind.__name__}.{where}: {first['msg']}") from error
    return message


def _shown(text: str) -> str:
    """As it may stand in a line of a log."""
    return ascii(text)[1:-1][:_QUOTED]


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _token_ids(reference: object, frames: Sequence[bytes]) -> array[int]:
    match reference:
        case {"frame": int(index), "count": int(count)} if len(frames) == 2 and index == 1:
            frame = frames[1]
        case _:
            raise ProtocolError("token_ids must name the one frame that follows the header")
    if count > MAX_PROMPT_TOKENS or len(frame) != count * _ID_BYTES:
        raise ProtocolError(f"a token frame of {len(frame)} bytes does not hold {count} ids")
    ids = array("i")
    ids.frombytes(frame)
    return _little_endian(ids)


def _little_endian(ids: array[int]) -> array[int]:
    """Swap to or from the wire's byte order on big-endian machines."""
    if ids.itemsize != _ID_BYTES or ids.typecode != "i":
        raise ProtocolError("token ids must be an int32 array")
    if sys.byteorder == "big":
        ids = array("i", ids)
        ids.byteswap()
    return ids
