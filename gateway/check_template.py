"""`prefixd check-template`: try a chat template, and see why a conversation caches or does not."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import orjson

from gateway.body import parse_object
from gateway.canonical import parse_messages, parse_tools
from gateway.conversation import Conversation
from gateway.model_files import load_model_files
from gateway.prompts import PromptMaker
from gateway.template_report import Report, report, verdict, where
from protocol.errors import RequestError, SettingsError
from protocol.model_path import resolve_model

STABLE, REWRITES, UNUSABLE = 0, 1, 2

_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "its name"}},
            "required": ["city"],
        },
    },
}


def _call(number: int, city: str) -> dict[str, Any]:
    arguments = orjson.dumps({"city": city}).decode()
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }


def _said(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


_CHAT = [
    _said("user", "Which river flows through Paris?"),
    _said("assistant", "The Seine."),
    _said("user", "And through Rome?"),
    _said("assistant", "The Tiber."),
    _said("user", "Which is longer?"),
]
_SYSTEM = _said("system", "Answer in one sentence.")
_LOOP = [
    _said("user", "Is it warmer in Rome or in Oslo?"),
    _said("assistant", "", tool_calls=[_call(1, "Rome")]),
    _said("tool", "24 degrees", tool_call_id="call_1"),
    _said("assistant", "", tool_calls=[_call(2, "Oslo")]),
    _said("tool", "9 degrees", tool_call_id="call_2"),
    _said("assistant", "In Rome."),
    _said("user", "Thanks. And in Bergen?"),
]
_PARALLEL = [
    _said("user", "Is it warmer in Rome or in Oslo?"),
    _said("assistant", "", tool_calls=[_call(1, "Rome"), _call(2, "Oslo")]),
    _said("tool", "24 degrees", tool_call_id="call_1"),
    _said("tool", "9 degrees", tool_call_id="call_2"),
    _said("assistant", "In Rome."),
    _said("user", "Thanks."),
]
_REASONING = [
    _said("user", "Is it warm in Rome?"),
    _said("assistant", "", reasoning_content="I should look it up.", tool_calls=[_call(1, "Rome")]),
    _said("tool", "24 degrees", tool_call_id="call_1"),
    _said("assistant", "Yes.", reasoning_content="24 degrees are warm."),
    _said("user", "Thanks."),
]
PROBES: dict[str, dict[str, Any]] = {
    "plain chat": {"messages": _CHAT},
    "system message": {"messages": [_SYSTEM, *_CHAT]},
    "tool loop": {"messages": [_SYSTEM, *_LOOP], "tools": [_TOOL]},
    "parallel tool results": {"messages": [_SYSTEM, *_PARALLEL], "tools": [_TOOL]},
    "reasoning echoed": {"messages": _REASONING, "tools": [_TOOL]},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 usable and prefix-stable, 1 usable but rewrites history, 2 wrong usage or unusable."""
    arguments = _parser().parse_args(argv)
    source = arguments.template or arguments.model
    try:
        maker = _maker(arguments)
        reports = [report(maker, name, conversation) for name, conversation in _conversations(arguments.messages)]
    except (SettingsError, RequestError) as error:
        if arguments.json:
            _print_json(UNUSABLE, f"unusable: {error}", source, [], [])
            return UNUSABLE
        print(f"prefixd check-template: unusable: {error}", file=sys.stderr)
        return UNUSABLE
    code, line = verdict(reports)
    times = [form for renderer in maker.renderers.values() if (form := renderer.template.time_of_day)]
    if code == STABLE and times:
        code, line = REWRITES, f"usable, but rewrites history: it writes the time of day ({times[0]})"
    control = sorted(maker.tokenizer.control.tokens)
    if arguments.json:
        _print_json(code, line, source, control, reports)
        return code
    for each in reports:
        print("\n".join(_shown(each) if arguments.messages else _summary(each)))
    if arguments.messages:
        print(f"text that message contents cannot spell as tokens: {' '.join(control) or 'none'}")
    print(line)
    return code


class _Parser(argparse.ArgumentParser):
    """Refuses in one line, without the page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(UNUSABLE, f"{self.prog}: error: {message}\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog="prefixd check-template",
        description="Show the boundaries of conversations, and whether each turn's prompt starts the next one's.",
        epilog="Exit codes: 0 usable and prefix-stable, 1 usable but rewrites history, 2 unusable or wrong usage.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="directory, .gguf file or name with tokenizer and template"
    )
    parser.add_argument("--template", metavar="FILE", help="Jinja file to try instead of the model's template")
    parser.add_argument("--tokenizer", metavar="DIR", help="where the tokenizer is, if there is no --model")
    parser.add_argument(
        "--messages",
        metavar="FILE",
        help="JSON: a list of messages, or a chat request's body; else probes are played",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _maker(arguments: argparse.Namespace) -> PromptMaker:
    if arguments.model and arguments.tokenizer:
        raise SettingsError("tokenizer: goes with --template, not with --model")
    if not arguments.model and not (arguments.template and arguments.tokenizer):
        raise SettingsError("model: name one, or give --template and --tokenizer")
    path = Path(arguments.model or arguments.tokenizer)
    if arguments.model and not path.is_dir():  # a directory needs no weights to be looked at
        path = resolve_model(arguments.model)
    files = load_model_files(path, Path(arguments.template) if arguments.template else None)
    if not files.templates:
        raise SettingsError(f"model: {path} has no chat template")
    return PromptMaker(files)


def _conversations(file: str | None) -> Iterator[tuple[str, Conversation]]:
    if file is None:
        for name, body in PROBES.items():
            yield name, _conversation(body)
        return
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise SettingsError(f"messages: cannot read {file}: {error.strerror}") from error
    try:
        body = parse_object(b'{"messages":' + content + b"}" if content.lstrip().startswith(b"[") else content)
        conversation = _conversation(body)
    except RequestError as error:
        raise SettingsError(f"messages: {file}: {error}") from error
    yield Path(file).name, conversation


def _conversation(body: dict[str, Any]) -> Conversation:
    variables = body.get("chat_template_kwargs")
    return Conversation(
        parse_messages(body.get("messages")),
        parse_tools(body.get("tools")),
        dict(variables) if isinstance(variables, dict) else {},
    )


def _summary(each: Report) -> Iterator[str]:
    if each.refused is not None:
        yield f"{each.name}: refused: {each.refused}"
        return
    kept = sum(line.position is not None for line in each.boundaries)
    turn = each.unstable
    fate = "each turn starts the next one" if turn is None else where(each, turn)
    yield f"{each.name}: {len(each.roles)} messages, {each.tokens} tokens, {kept} boundaries; {fate}"
    for line in each.boundaries:
        if line.message is not None and line.reason is not None:
            yield f"  message {line.message} ({each.roles[line.message]}) has none: {line.reason}"


def _shown(each: Report) -> Iterator[str]:
    if each.refused is not None:
        yield f"refused: {each.refused}"
        return
    yield f"{len(each.roles)} messages, {each.tokens} tokens"
    yield f"{'token':>8}  {'message':<7}  {'role':<9}  {'kind':<8}  boundary"
    for line in each.boundaries:
        message = "-" if line.message is None else str(line.message)
        role = "-" if line.message is None else each.roles[line.message]
        position = "-" if line.position is None else str(line.position)
        fate = "kept" if line.reason is None else f"dropped: {line.reason}"
        if line.message is not None and line.position is not None and line.exact is None:
            fate += " (as the last message it is written differently)"
        yield f"{position:>8}  {message:<7}  {role:<9}  {line.kind:<8}  {fate}"
    for turn in each.turns:
        if turn.stable is None:
            fate = "the last turn"
        elif turn.stable:
            fate = "starts the next turn's prompt" + ("" if turn.whole else " up to its last boundary")
        else:
            fate = where(each, turn)
        yield f"turn of {turn.messages} messages, {turn.tokens} tokens: {fate}"


def _print_json(
    code: int, line: str, source: str | None, control: Sequence[str], reports: Sequence[Report]
) -> None:
    data = {
        "verdict": ("stable", "rewrites", "unusable")[code],
        "reason": line,
        "source": source,
        "control_tokens": control,
        "conversations": [
            asdict(each) | {"boundaries": [asdict(b) | {"kept": b.position is not None} for b in each.boundaries]}
            for each in reports
        ],
    }
    print(orjson.dumps(data, option=orjson.OPT_INDENT_2).decode())


if __name__ == "__main__":
    sys.exit(main())
