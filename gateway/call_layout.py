"""How a model spells its calls: what is fixed around names and arguments, and how the arguments are written."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from gateway.reply_call_gemma import bare_text

# What differs from call to call stands in a layout as one of these: the name where it is written twice, ids, numbers.
NAMED, CALL_ID, COUNT = "\U000ffffa", "\U000ffffb", "\U000ffffc"


class Tags(NamedTuple):
    """What stands around the key and the value of one argument, where each has tags of its own."""

    open: str
    middle: str
    close: str


class Bare(NamedTuple):
    """Keys without quotes, strings between two `quote`s. `ordered`: the keys are sorted."""

    quote: str
    ordered: bool


class Again(NamedTuple):
    """What stands between the arguments of a call and the next one's name, and between that and its arguments."""

    join: str
    between: str


@dataclass(frozen=True, slots=True)
class CallLayout:
    """A call is `before` name `between` arguments `after`; of several, `after` follows the last.

    The arguments are JSON unless `values` says how else they are written. `again` is None where a template has no
    place for a second call.
    """

    before: str
    between: str
    after: str
    values: Tags | Bare | None = None
    again: Again | None = None

    def written(self, *calls: tuple[str, dict[str, Any]]) -> str:
        """Calls as the model would write them."""
        text = ""
        for at, (name, arguments) in enumerate(calls):
            before, between = (self.before, self.between) if not at else self.again or ("", "")
            head = (before + name + between).replace(NAMED, name).replace(COUNT, str(at))
            text += head.replace(CALL_ID, f"call_{at}") + self._arguments(arguments)
        return text + self.after.replace(COUNT, "0").replace(CALL_ID, "call_0")

    def behind(self, text: str, arguments: dict[str, Any]) -> str | None:
        """What follows some arguments with which a text begins; None where it does not begin with them."""
        if self.values is not None:
            written = self._arguments(arguments)
            return text.removeprefix(written) if text.startswith(written) else None
        try:
            found, end = json.JSONDecoder().raw_decode(text)
        except ValueError:
            return None
        return text[end:] if found == arguments else None

    def _arguments(self, arguments: dict[str, Any]) -> str:
        match self.values:
            case None:
                return json.dumps(arguments, ensure_ascii=False)
            case Bare(_, ordered):
                return bare_text(dict(sorted(arguments.items())) if ordered else arguments)
            case Tags(opened, middle, close):
                texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
                return "".join(opened + key + middle + text + close for key, text in texts.items())


class AnswerLayout(NamedTuple):
    """What is known of the form of a model's answers.

    `calls` are the ways in which it may spell calls, the template's first; `said` is what stands before text, and
    `resumed` what stands between reasoning and anything behind it: None where that cannot be told.

    Calls begin with one of the `openers`, or, spelled as `bare`, with an answer or behind `close`, which ends
    reasoning; there are no openers where this is not all. `markers` are all strings that mean something in answers.
    """

    calls: tuple[CallLayout, ...] = ()
    said: str | None = ""
    resumed: str | None = None
    openers: tuple[str, ...] = ()
    bare: CallLayout | None = None
    close: str = ""
    markers: frozenset[str] = frozenset()
