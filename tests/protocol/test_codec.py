"""Frames: every message survives the trip, and nothing else is let in."""

from array import array
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import get_args

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import decode, encode
from protocol.digest import DIGEST_BYTES
from protocol.errors import ProtocolError, VersionMismatch
from protocol.limits import MAX_GRAMMAR_CHARACTERS, MAX_HEADER_BYTES, MAX_REQUEST_ID_CHARACTERS
from protocol.messages import (
    PROTOCOL_VERSION,
    Absorb,
    Boundary,
    Cancel,
    Command,
    Generate,
    Heartbeat,
    Hello,
    Message,
    ModelInfo,
    Reply,
    Sampling,
    TokenLogprob,
    Tokens,
    Vocabulary,
)

ids = st.lists(st.integers(0, 2**31 - 1)).map(lambda values: array("i", values))
digests = st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)
numbers = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**31)
json = st.recursive(st.none() | st.booleans() | counts | st.text(), lambda inner: st.lists(inner))

request_ids = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=MAX_REQUEST_ID_CHARACTERS)
boundaries = st.builds(
    Boundary, end=counts, digest=digests, kind=st.sampled_from(["head", "message", "interior"]), messages=counts
)
samplings = st.builds(
    Sampling,
    max_tokens=counts,
    temperature=numbers,
    logit_bias=st.dictionaries(counts, numbers),
    seed=st.none() | counts,
    stop_token_ids=st.lists(counts).map(tuple),
    grammar=st.none() | st.text(min_size=1),
)
messages = st.one_of(
    st.builds(Hello, gateway_id=st.text()),
    st.builds(
        Generate,
        request_id=request_ids,
        token_ids=ids,
        boundaries=st.lists(boundaries).map(tuple),
        sampling=samplings,
        tenant=st.text(),
    ),
    st.builds(
        Cancel, request_id=st.text(), cause=st.sampled_from(["disconnect", "stop"]), choice=st.none() | counts
    ),
    st.builds(
        Tokens,
        epoch=st.text(),
        request_id=st.text(),
        choice=counts,
        token_ids=ids,
        logprobs=st.lists(
            st.builds(
                TokenLogprob, token_id=counts, logprob=numbers, top=st.lists(st.tuples(counts, numbers)).map(tuple)
            )
        ).map(tuple),
    ),
    st.builds(
        Vocabulary,
        tokens=st.text(),
        special_token_ids=st.lists(counts).map(tuple),
        end_token_ids=st.lists(counts).map(tuple),
    ),
    st.builds(Command, command_id=st.text(), verb=st.text(), args=st.dictionaries(st.text(), json)),
    st.builds(Reply, epoch=st.text(), command_id=st.text(), data=json, error=st.none() | st.text()),
)


@given(messages)
def test_a_message_survives_the_trip(message):
    assert decode(encode(message)) == message


@given(st.lists(st.binary(max_size=64), max_size=5))
def test_arbitrary_frames_are_refused_and_nothing_else_is_raised(frames):
    with pytest.raises(ProtocolError):
        decode(frames)


@given(messages, st.data())
def test_a_damaged_header_is_refused_or_still_a_message(message, data):
    header, *rest = encode(message)
    place = data.draw(st.integers(0, len(header) - 1))
    damaged = header[:place] + bytes([data.draw(st.integers(0, 255))]) + header[place + 1 :]
    with suppress(ProtocolError):
        assert is_dataclass(decode([damaged, *rest]))


def generate(**changes):
    return Generate(
        **{"request_id": "r", "token_ids": array("i", [1, 2, 3]), "boundaries": (), "sampling": Sampling(1)}
        | changes
    )


def test_a_token_frame_of_the_wrong_size_is_refused():
    header, tokens = encode(generate())
    for wrong in (tokens[:-1], tokens + b"\0\0\0\0", b""):
        with pytest.raises(ProtocolError, match="does not hold 3 ids"):
            decode([header, wrong])
    with pytest.raises(ProtocolError, match="must name the one frame"):
        decode([header])


def test_stray_frames_are_refused():
    with pytest.raises(ProtocolError, match="no token frames"):
        decode([*encode(Hello("g")), b"1234"])


def test_an_absorption_needs_a_boundary():
    boundary = Boundary(3, b"d" * DIGEST_BYTES, "message", 1)
    message = Absorb("r", array("i", [1, 2, 3]), (boundary,))
    assert decode(encode(message)) == message
    with pytest.raises(ProtocolError, match="boundaries"):
        decode(encode(replace(message, boundaries=())))


def test_another_version_is_refused():
    header = orjson.loads(encode(Hello("g"))[0])
    header["v"] = PROTOCOL_VERSION + 1
    with pytest.raises(VersionMismatch, match="upgrade both sides"):
        decode([orjson.dumps(header)])


def test_the_version_is_looked_at_before_anything_else():
    """Of a version to come nothing is known but that it says which one it is."""
    header = {"v": PROTOCOL_VERSION + 1, "type": "Telegram", "words": [1, 2, 3]}
    with pytest.raises(VersionMismatch, match=f"{PROTOCOL_VERSION + 1} is not {PROTOCOL_VERSION}"):
        decode([orjson.dumps(header), b"of any kind", b"and number"])


@pytest.mark.parametrize("version", [None, "1", [1], 1.5])
def test_what_is_no_version_is_no_other_one_either(version):
    with pytest.raises(ProtocolError) as refused:
        decode([orjson.dumps({"v": version, "type": "Hello", "body": {"gateway_id": "g"}})])
    assert not isinstance(refused.value, VersionMismatch)


def test_a_wrong_field_is_named():
    header = orjson.loads(encode(Hello("g"))[0])
    header["body"]["gateway_id"] = 3
    with pytest.raises(ProtocolError, match=r"Hello\.gateway_id"):
        decode([orjson.dumps(header)])


def test_a_digest_of_the_wrong_length_is_refused():
    header, tokens = encode(generate(boundaries=(Boundary(3, bytes(DIGEST_BYTES), "message", 1),)))
    damaged = header.replace(b'"' + b"00" * DIGEST_BYTES + b'"', b'"00"')
    assert damaged != header
    with pytest.raises(ProtocolError, match="digest"):
        decode([damaged, tokens])


def test_an_oversized_header_is_refused_before_it_is_parsed():
    with pytest.raises(ProtocolError, match="over the limit"):
        decode([b"[" * (MAX_HEADER_BYTES + 1)])


def test_ids_of_another_width_are_not_sent():
    with pytest.raises((ProtocolError, TypeError)):
        encode(generate(token_ids=array("q", [1])))


def test_a_heartbeat_carries_the_model():
    info = ModelInfo("f", "llama", "float32", "cpu", 10, 20, 30, 40, 50, 60, True)
    beat = Heartbeat("e", "ready", "", 0.5, 1, 2, info)
    assert decode(encode(beat)) == beat


def test_every_message_is_frozen_and_typed():
    for kind in get_args(Message):
        assert kind.__dataclass_params__.frozen
        assert fields(kind)


@pytest.mark.parametrize("grammar", ["", "x" * (MAX_GRAMMAR_CHARACTERS + 1)])
def test_a_grammar_has_a_size(grammar):
    frames = encode(Generate("r", array("i", [1]), (), Sampling(1, grammar=grammar)))
    with pytest.raises(ProtocolError, match=r"Generate\.sampling\.grammar"):
        decode(frames)


@pytest.mark.parametrize("request_id", ["a b", "a\nrequest=forged state=finished", "é", "x" * 257])
def test_a_request_has_a_name_that_is_one_word_of_the_log(request_id):
    with pytest.raises(ProtocolError, match=r"Generate\.request_id"):
        decode(encode(generate(request_id=request_id)))


@pytest.mark.parametrize("name", ["type", "v"])
def test_a_header_that_nests_as_deep_as_json_may_is_refused_in_few_words(name):
    nested = b"[" * 1015 + b"]" * 1015
    for value in (nested, b'"' + b"x" * 100_000 + b'"', b"null", b"true", b"1.0"):
        header = b'{"v":1,"type":"Hello","body":{"gateway_id":"g"}}'
        damaged = header.replace(
            b'"type":"Hello"' if name == "type" else b'"v":1', b'"%b":%b' % (name.encode(), value)
        )
        with pytest.raises(ProtocolError) as refused:
            decode([damaged])
        assert len(str(refused.value)) < 200
