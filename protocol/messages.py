"""Every message that crosses a process border, with its direction.

`work` socket: gateway (DEALER) <-> worker (ROUTER). `control` socket: cachectl and gateway (DEALER) <->
worker (ROUTER). Frames and checks are in `codec.py`; the data of control replies is in `control.py`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field, InstanceOf

from protocol.digest import DIGEST_BYTES
from protocol.limits import MAX_GRAMMAR_CHARACTERS, MAX_REQUEST_ID_CHARACTERS

PROTOCOL_VERSION = 1


def _digest(value: object) -> object:
    """Digests travel as hex text in the header."""
    digest = bytes.fromhex(value) if isinstance(value, str) else value
    if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:
        raise ValueError(f"a digest has {DIGEST_BYTES} bytes")
    return digest


Digest = Annotated[bytes, BeforeValidator(_digest)]
# Stands in log lines: one word of them.
RequestId = Annotated[str, Field(max_length=MAX_REQUEST_ID_CHARACTERS, pattern="^[!-~]*$")]
if TYPE_CHECKING:
    TokenIds = array[int]
else:
    TokenIds = InstanceOf[array]  # int32 (typecode "i"), sent as a raw frame of its own

Outcome = Literal["hit", "partial", "miss"]
# Why a request did not start from the deepest boundary ever computed; `none` belongs to a hit.
Reason = Literal[
    "none",
    "cold",
    "diverged",
    "evicted",
    "flushed",
    "not_kept",
    "longer_than_prompt",
    "no_boundary",
    "stale",
    "fingerprint",
    "restore_failed",
    "disabled",
]
BoundaryKind = Literal["head", "message", "interior"]
FinishReason = Literal["stop", "length", "cancelled"]
FailureCode = Literal["invalid", "too_long", "queue_full", "out_of_memory", "internal", "stopping", "loading"]
Phase = Literal["starting", "loading", "ready", "hung", "stopping", "failed"]


@dataclass(frozen=True, slots=True)
class Boundary:
    """End of one message: `digest` names all tokens in [0, end).

    `kind` is `head` for the end of tools and system text, `message` for the end of a message and `interior` for a
    cut inside a long one. `messages` counts the client's messages that lie wholly before `end`.
    """

    end: int
    digest: Digest
    kind: BoundaryKind
    messages: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. `temperature` 0 is greedy; `max_tokens` counts new tokens per choice."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None  # choice i of a request uses seed + i
    logprobs: int | None = None  # None: none; k: the chosen token's and the k best
    stop_token_ids: tuple[int, ...] = ()  # ending a choice with `stop`; the token itself is not sent
    # An llguidance grammar that each choice follows and ends with; needs the worker to know the `Vocabulary`.
    grammar: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)] | None = None


@dataclass(frozen=True, slots=True)
class Hello:
    """gateway -> worker: first message of a connection, repeated as a heartbeat."""

    gateway_id: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A boundary that a client has marked: what is kept there should stay for so many seconds after its last use."""

    end: int
    seconds: Annotated[int, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class Hint:
    """What a client says about the further use of a prompt. It may keep a snapshot longer, and never finds one.

    `session` is a short digest of the client's own name for the conversation; "" where it has none.
    """

    session: str = ""
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True)
class Generate:
    """gateway -> worker: start one request of `n` choices.

    `token_ids` is the whole prompt; `boundaries` rise by `end`, the generation suffix follows the last one.
    `member` is one of several that use a tenant's cache and keep their conversations apart by their digests: it has
    its own turns in the queue, and is not told where its prompt differs from what the tenant's others sent.
    """

    request_id: RequestId
    token_ids: TokenIds
    boundaries: tuple[Boundary, ...]
    sampling: Sampling
    n: int = 1
    cache_prompt: bool = True
    tenant: str = ""
    hint: Hint | None = None
    member: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    """gateway -> worker: stop one request, or one of its choices.

    `cause` `stop` means a stop string was found: the choice ended well and counts as finished, not as cancelled.
    """

    request_id: str
    cause: Literal["disconnect", "stop", "shutdown"]
    choice: int | None = None


@dataclass(frozen=True, slots=True)
class Absorb:
    """gateway -> worker: a conversation as its next turn will send it, up to the end of the answer just given.

    The worker computes it when it has nothing else to do and keeps the last boundary, where `token_ids` end. There
    is no answer to it.
    """

    request_id: RequestId  # of the request that was answered
    token_ids: TokenIds
    boundaries: Annotated[tuple[Boundary, ...], Field(min_length=1)]
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """gateway -> worker: the bytes of every token, once, before the first request with a grammar.

    `tokens` is hex, in the order of ids, with a blank between two. Special tokens match no text of a grammar.
    """

    tokens: str
    special_token_ids: tuple[int, ...]
    end_token_ids: tuple[int, ...]  # with which answers end


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a gateway must know of the loaded model."""

    fingerprint: str  # of weights, config, dtype and format: the root of all digests
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_memory_bytes: int
    slots: int
    deterministic: bool


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """worker -> gateway: every half second, and at once in answer to Hello.

    `loop_age_seconds` is the time since the engine loop last turned: it grows while a step runs. A worker is hung
    while a step takes far longer than such steps did, and failed once that does not end.
    """

    epoch: str
    phase: Phase
    detail: str  # what is being loaded, what it hangs in, or the cause of a failure
    loop_age_seconds: float
    requests_running: int
    requests_waiting: int
    model: ModelInfo | None


@dataclass(frozen=True, slots=True)
class Accepted:
    """worker -> gateway: a request has been looked up and scheduled. `depth` is the restored position.

    `exact` is false where what was restored had been computed with other numerics: its bits may be others'.
    """

    epoch: str
    request_id: str
    outcome: Outcome
    depth: int
    reason: Reason
    diverged_message: int | None = None  # index of the client's message with the first difference
    diverged_token: int | None = None  # its token position
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Progress:
    """worker -> gateway: prefill has reached `computed` of the prompt's tokens."""

    epoch: str
    request_id: str
    computed: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities (natural) of one step: the chosen token's, and the best ones in falling order."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Tokens:
    """worker -> gateway: new tokens of one choice. `logprobs` has one entry a token when asked for."""

    epoch: str
    request_id: str
    choice: int
    token_ids: TokenIds
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """worker -> gateway: one choice ended after `completion_tokens` tokens (a stop token is counted)."""

    epoch: str
    request_id: str
    choice: int
    reason: FinishReason
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Completed:
    """worker -> gateway: the last event of a request whose choices all ended. Final cache values and times.

    `kept` is the deepest position of the prompt at which this request left a snapshot; 0 if it left none. `exact` as in
    `Accepted`.
    """

    epoch: str
    request_id: str
    outcome: Outcome
    depth: int
    reason: Reason
    prompt_tokens: int
    completion_tokens: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    kept: int = 0
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Failed:
    """worker -> gateway: the last event of a request that could not be served."""

    epoch: str
    request_id: str
    code: FailureCode
    message: str


@dataclass(frozen=True, slots=True)
class Command:
    """cachectl or gateway -> worker, control socket. `args` belong to `verb` (see control.py)."""

    command_id: str
    verb: str
    args: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """worker -> cachectl or gateway, control socket. `error` is set when the command was refused."""

    epoch: str
    command_id: str
    data: object = None
    error: str | None = None


Message = (
    Hello
    | Generate
    | Cancel
    | Absorb
    | Vocabulary
    | Heartbeat
    | Accepted
    | Progress
    | Tokens
    | Finished
    | Completed
    | Failed
    | Command
    | Reply
)
