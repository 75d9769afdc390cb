"""A chat template that tells where in its text each message ends.

The template's syntax tree is changed once, at load: every loop reports the message it is about to render, and that
it is done. Text comes out of the template in pieces, in order, so what has come out when a loop reports is the
message's exact position. One render thus gives the text and all positions, whatever the messages hold and
whatever the template trims. Loops whose output is captured (macros, set and filter blocks) report nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import TemplateSyntaxError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.template_env import TemplateTooSlow, build_environment
from gateway.template_gathered import CAPTURING, Gathered, report_growth
from gateway.template_reads import ARRIVE, LOOK, REST, make_resumable, time_of_day, vocabulary
from gateway.template_resume import Course, ResumableLoop, loop_context
from protocol.errors import SettingsError

_ENTER, _LEAVE, _OWNED = "prefixd_enter_message", "prefixd_leave_messages", "prefixd_owners"
_TICK, _GREW = "prefixd_tick", "prefixd_text_grew"
MAX_RENDER_SECONDS = 10.0  # of one render; a conversation of a thousand messages takes some hundredths of one
NOBODY = -1  # owner of text that no message's iteration wrote


class Span(NamedTuple):
    """Text [start, end) written while `owner` (a message index, or NOBODY) was being rendered; never empty."""

    owner: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Rendered:
    """A render and who wrote what in it. Spans are in order and cover the text."""

    text: str
    spans: tuple[Span, ...]


class ChatTemplate:
    """One compiled template. Immutable and safe to use from several threads at once."""

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, Any],
        *,
        max_seconds: float = MAX_RENDER_SECONDS,
        gathers: bool = False,
    ) -> None:
        """`special_tokens` are the variables such as `bos_token`. Raises `SettingsError` for a bad template.

        `gathers`: who wrote what is followed into namespaces, whose text is printed at the end.
        """
        self.source = source
        self._max_seconds = max_seconds
        self._variables = special_tokens
        environment = build_environment()
        environment.filters |= {_ENTER: _entered, _LEAVE: _left, _TICK: _ticked, _GREW: _grew}
        environment.filters |= {ARRIVE: _arrived, REST: _rest, LOOK: _looked_up}
        try:
            tree = environment.parse(source)
            self._names, self.looked_for = vocabulary(tree)
            self.time_of_day = time_of_day(tree)
            _report_loops(tree, environment)
            _tick_elsewhere(tree, environment)
            if gathers:
                report_growth(tree, _GREW, environment)
            self._loop = None if gathers else _resumable_loop(tree, environment)
            self._template = Template.from_code(environment, environment.compile(tree), environment.globals)
        except TemplateSyntaxError as error:
            raise SettingsError(f"chat_template: line {error.lineno}: {error.message}") from error
        self._template.root_render_func.__globals__["LoopContext"] = loop_context

    @property
    def is_resumable(self) -> bool:
        """Whether renders may go on from earlier ones with the same beginning."""
        return self._loop is not None

    def gathering(self) -> ChatTemplate:
        """The same for a template that gathers its text before it prints any."""
        return ChatTemplate(self.source, self._variables, max_seconds=self._max_seconds, gathers=True)

    def mentions(self, name: str) -> bool:
        """Whether the template reads a field or variable of this name anywhere."""
        return name in self._names

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        *,
        reply: bool,
        extra: dict[str, Any] | None = None,
        owners: Sequence[int] | None = None,
    ) -> Rendered:
        """Render; `reply` adds the generation prompt, `owners` are the messages' indices if not 0, 1, 2 and so on.

        Raises what the template raises, and `TemplateTooSlow`.
        """
        deadline = time.monotonic() + self._max_seconds
        course = Course(self._loop, reply) if self._loop else None
        owned = _Owners(messages, range(len(messages)) if owners is None else owners, deadline, course)
        context = self._variables | (extra or {})
        context |= {"messages": messages, "tools": tools, "add_generation_prompt": reply}
        context[_OWNED] = owned
        for piece in self._template.root_render_func(self._template.new_context(context)):
            if piece:
                owned.wrote(piece)
        return owned.rendered()


class _Owners:
    """Follows which message a render is busy with. Loops may nest; an inner one hides the outer until it ends.

    Every round of a loop and every call of a macro asks whether the render has had its time.
    """

    def __init__(
        self,
        messages: Sequence[dict[str, Any]],
        owners: Sequence[int],
        deadline: float,
        course: Course | None,
    ) -> None:
        self.course = course
        self._deadline = deadline
        self._index = {id(m): owner for m, owner in zip(messages, owners, strict=True) if owner != NOBODY}
        self._stack: list[tuple[int, int]] = []  # (loop, owner)
        self._spans: list[tuple[int, int]] = []  # (owner, length)
        self._pieces: list[str] = []
        self._at = 0  # length of all pieces
        self._taken = False  # the next piece is from another render, its spans are there already
        self._gathered: dict[str, Gathered] = {}

    def arrive(self, items: object, variables: dict[str, Any]) -> str:
        """The loop that may be resumed is about to start. What comes out takes the place of its first rounds."""
        assert self.course is not None
        taken = self.course.arrive(items, self._index, variables, self._pieces, self._spans)
        if taken is None:
            return ""
        self._spans[:] = taken.spans
        self._taken = bool(taken.text)
        return taken.text

    def enter(self, loop: int, item: object) -> str:
        """A loop starts an iteration over `item`; items that are no message change nothing."""
        self.tick()
        if self.course is not None and self.course.loop.number == loop:
            self.course.begin_round(self._at, self._spans)
        owner = self._index.get(id(item))
        if owner is not None:
            self.leave(loop)
            self._stack.append((loop, owner))
        return ""

    def tick(self) -> str:
        if time.monotonic() > self._deadline:
            raise TemplateTooSlow("it takes too long")
        return ""

    def leave(self, loop: int) -> str:
        """A loop has ended: it and those inside it own nothing any more."""
        for depth, (open_loop, _) in enumerate(self._stack):
            if open_loop == loop:
                del self._stack[depth:]
                break
        return ""

    def wrote(self, piece: str) -> None:
        """The template has written a piece of text that is not empty."""
        self._pieces.append(piece)
        self._at += len(piece)
        if self._taken:
            self._taken = False
            return
        owner = self._stack[-1][1] if self._stack else NOBODY
        if self._gathered and owner == NOBODY:
            found = next((each for each in self._gathered.values() if each.text is piece), None)
            if found is not None:
                self._spans += found.spans
                return
        if self._spans and self._spans[-1][0] == owner:
            self._spans[-1] = (owner, self._spans[-1][1] + len(piece))
        else:
            self._spans.append((owner, len(piece)))

    def grew(self, value: object, name: str) -> str:
        """Text was added to what a namespace gathers."""
        self._gathered.setdefault(name, Gathered()).grew(value, self._stack[-1][1] if self._stack else NOBODY)
        return ""

    def rendered(self) -> Rendered:
        """All of it, once the template is through."""
        text = "".join(self._pieces)
        if self.course is not None:
            self.course.end(text, self._spans)
        spans: list[Span] = []
        at = 0
        for owner, length in self._spans:
            spans.append(Span(owner, at, at + length))
            at += length
        return Rendered(text, tuple(spans))


def _resumable_loop(tree: nodes.Template, environment: ImmutableSandboxedEnvironment) -> ResumableLoop | None:
    """The last loop of a template that can be resumed, changed to be. To be called once all loops report."""
    for node in reversed(tree.body):
        match node:
            case nodes.For(
                body=[nodes.Output(nodes=[nodes.Filter(name=name, args=[nodes.Const(value=number)])]), *_]
            ):
                reads = make_resumable(tree, node, environment) if name == _ENTER else None
                if reads is not None:
                    return ResumableLoop(reads, number, environment)
    return None


def _report_loops(tree: nodes.Template, environment: ImmutableSandboxedEnvironment) -> None:
    """Add a report to the start of every loop's body and behind every loop."""
    count = 0

    def visit(node: nodes.Node) -> None:
        nonlocal count
        for name, value in list(node.iter_fields()):
            if not isinstance(value, list):
                if isinstance(value, nodes.Node) and not isinstance(value, CAPTURING):
                    visit(value)
                continue
            changed: list[Any] = []
            for child in value:
                changed.append(child)
                if not isinstance(child, nodes.Node) or isinstance(child, CAPTURING):
                    continue
                visit(child)
                if isinstance(child, nodes.For) and (item := _item(child)) is not None:
                    loop = nodes.Const(count, lineno=child.lineno)
                    count += 1
                    child.body.insert(0, _report(_ENTER, item, [loop]))
                    changed.append(_report(_LEAVE, loop, []))
            setattr(node, name, changed)

    visit(tree)
    tree.set_environment(environment)


def _tick_elsewhere(tree: nodes.Template, environment: ImmutableSandboxedEnvironment) -> None:
    """Have the loops that report nothing, and macros, ask for the time."""
    bodies = [loop.body for loop in tree.find_all(nodes.For)] + [
        macro.body for macro in tree.find_all(nodes.Macro)
    ]
    for body in bodies:
        match body:
            case [nodes.Output(nodes=[nodes.Filter(name=name)]), *_] if name == _ENTER:
                continue
        body.insert(0, _report(_TICK, nodes.Const("", lineno=body[0].lineno if body else 0), []))
    tree.set_environment(environment)


def _item(loop: nodes.For) -> nodes.Expr | None:
    """The expression for what an iteration is about: the target, or `list[target]` in a loop over an index."""
    if not isinstance(loop.target, nodes.Name):
        return None
    target = loop.target.name
    over_index = (
        isinstance(loop.iter, nodes.Call)
        and isinstance(loop.iter.node, nodes.Name)
        and loop.iter.node.name == "range"
    )
    if over_index:
        for node in loop.find_all(nodes.Getitem):
            if isinstance(node.arg, nodes.Name) and node.arg.name == target and isinstance(node.node, nodes.Name):
                base = nodes.Name(node.node.name, "load", lineno=loop.lineno)
                index = nodes.Name(target, "load", lineno=loop.lineno)
                return nodes.Getitem(base, index, "load", lineno=loop.lineno)
        return None
    return nodes.Name(target, "load", lineno=loop.lineno)


def _report(name: str, about: nodes.Expr, more: list[nodes.Expr]) -> nodes.Output:
    """A report as a filter: the sandbox looks long at every call of a function, and not at filters."""
    line = about.lineno
    return nodes.Output([nodes.Filter(about, name, more, [], None, None, lineno=line)], lineno=line)


@pass_context
def _entered(context: Context, item: object, loop: int) -> str:
    owned: _Owners = context.parent[_OWNED]
    return owned.enter(loop, item)


@pass_context
def _arrived(context: Context, items: object, variables: dict[str, Any]) -> str:
    owned: _Owners = context.parent[_OWNED]
    return owned.arrive(items, variables)


@pass_context
def _rest(context: Context, items: object) -> object:
    owned: _Owners = context.parent[_OWNED]
    assert owned.course is not None
    return owned.course.rest(items)


@pass_context
def _looked_up(context: Context, value: object, name: str, index: object) -> object:
    owned: _Owners = context.parent[_OWNED]
    assert owned.course is not None
    return owned.course.look_up(name, value, index)


@pass_context
def _left(context: Context, loop: int) -> str:
    owned: _Owners = context.parent[_OWNED]
    return owned.leave(loop)


@pass_context
def _grew(context: Context, value: object, name: str) -> str:
    owned: _Owners = context.parent[_OWNED]
    return owned.grew(value, name)


@pass_context
def _ticked(context: Context, _: object) -> str:
    owned: _Owners = context.parent[_OWNED]
    return owned.tick()
