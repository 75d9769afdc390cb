"""What a template reads: the names in it, and what the rounds of its loop over messages read besides their message.

Where that is little and can be compared, a render may go on from one of before: a round that starts from the same
values writes the same text. Whatever could make a round depend on something else makes the loop one that is always
rendered whole: what is not understood here is not known to be equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

ARRIVE, REST, LOOK = "prefixd_arrive_at_loop", "prefixd_rest_of_loop", "prefixd_look_up"
CALLABLE = frozenset(("raise_exception", "range", "namespace", "dict"))  # what they give depends on nothing else
_BEHIND = frozenset(("first", "index", "index0", "previtem", "depth", "depth0"))  # fields of `loop`
_AHEAD = frozenset(("last", "nextitem"))
_ORDER = frozenset(("gt", "gteq", "lt", "lteq", "eq", "ne"))
_SEARCHES = {"split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find", "rfind", "replace"}
_TIMES = re.compile("%[-_0^#]?[HIMSfTXcsprR]")
_REFUSED_NAMES = frozenset(("strftime_now", "lipsum", "self", "super", "caller", "varargs", "kwargs"))
_REFUSED = (
    nodes.Block,
    nodes.CallBlock,
    nodes.ContextReference,
    nodes.DerivedContextReference,
    nodes.EnvironmentAttribute,
    nodes.EvalContextModifier,
    nodes.Extends,
    nodes.ExtensionAttribute,
    nodes.FromImport,
    nodes.Import,
    nodes.ImportedName,
    nodes.Include,
    nodes.InternalName,
    nodes.Macro,
    nodes.OverlayScope,
)


@dataclass(frozen=True, slots=True)
class Limit:
    """A round's number (`first` is that of the first round) compared with a namespace's field."""

    name: str
    field: str
    operator: str
    first: int


@dataclass(slots=True)
class Reads:
    """Names of variables from outside the loop, and what of them is read.

    `fields` and `written` are pairs of a name and a field, which is all that is read of a namespace. What is
    `indexed` is looked up item by item, and each such look is noted. `ahead` counts messages behind a round's own.
    """

    names: set[str] = field(default_factory=set)
    fields: set[tuple[str, str]] = field(default_factory=set)
    written: set[tuple[str, str]] = field(default_factory=set)
    limits: set[Limit] = field(default_factory=set)
    indexed: set[str] = field(default_factory=set)
    ahead: int = 0

    @property
    def roots(self) -> frozenset[str]:
        """Every variable of which anything is read."""
        of_fields = {name for name, _ in self.fields | self.written}
        return frozenset(self.names | of_fields | {limit.name for limit in self.limits} | self.indexed)


class _NotKnownError(Exception):
    """A round may depend on what cannot be compared."""


def make_resumable(
    tree: nodes.Template, loop: nodes.For, environment: ImmutableSandboxedEnvironment
) -> Reads | None:
    """What a top-level loop reads, and the loop changed to tell of it. None, and no change, where that is not known."""
    if not isinstance(loop.target, nodes.Name) or not isinstance(loop.iter, nodes.Name):
        return None
    if loop.test is not None or loop.else_ or loop.recursive:
        return None
    reader = _Reader(tree, loop)
    try:
        for node in loop.body:
            reader.visit(node)
    except _NotKnownError:
        return None
    roots = reader.reads.roots
    at = tree.body.index(loop)
    later = {name.name for node in tree.body[at + 1 :] for name in node.find_all(nodes.Name) if name.ctx != "load"}
    later |= {macro.name for node in tree.body[at + 1 :] for macro in _macros(node)}
    if roots & later:
        return None  # asked for earlier than the template does, it might be another variable
    _Looks(reader.looks, environment).visit(loop)
    line = loop.lineno
    values = nodes.Dict(
        [
            nodes.Pair(nodes.Const(name, lineno=line), nodes.Name(name, "load", lineno=line), lineno=line)
            for name in sorted(roots)
        ],
        lineno=line,
    )
    items = nodes.Name(loop.iter.name, "load", lineno=line)
    arrival = nodes.Filter(items, ARRIVE, [values], [], None, None, lineno=line)
    tree.body.insert(at, nodes.Output([arrival], lineno=line))
    loop.iter = nodes.Filter(loop.iter, REST, [], [], None, None, lineno=line)
    tree.set_environment(environment)
    return reader.reads


def _macros(node: nodes.Node) -> list[nodes.Macro]:
    found = list(node.find_all(nodes.Macro))
    return [node, *found] if isinstance(node, nodes.Macro) else found


class _Reader:
    """Walks through a loop's body. `nested`: inside another loop, whose `loop` is its own; `macro`: inside one."""

    def __init__(self, tree: nodes.Template, loop: nodes.For) -> None:
        assert isinstance(loop.target, nodes.Name)
        self.reads = Reads()
        self.looks: set[int] = set()  # ids of the nodes that look something up
        self._target = loop.target.name
        self._own = {
            name.name for node in loop.body for name in node.find_all(nodes.Name) if name.ctx != "load"
        } | {self._target}
        self._macros: dict[str, list[nodes.Macro]] = {}
        for macro in tree.find_all(nodes.Macro):
            self._macros.setdefault(macro.name, []).append(macro)
        self._seen: set[str] = set()

    def visit(self, node: nodes.Node, nested: bool = False, macro: bool = False) -> None:
        """Raises `_NotKnownError`."""
        if isinstance(node, _REFUSED) or (isinstance(node, nodes.Filter) and node.name == "random"):
            raise _NotKnownError
        match node:
            case nodes.For():
                self.visit(node.iter, nested, macro)
                for part in (node.target, node.test, *node.body, *node.else_):
                    if part is not None:
                        self.visit(part, nested=True, macro=macro)
            case nodes.Compare(expr=number, ops=[nodes.Operand(op=op, expr=nodes.Getattr() as limit)]) if (
                not nested and not macro and self._limit(number, op, limit)
            ):
                pass
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=name):
                self._of_loop(name, nested, macro)
            case nodes.Getitem(node=nodes.Name(name="loop"), arg=nodes.Const(value=str(name))):
                self._of_loop(name, nested, macro)
            case nodes.Getattr(node=nodes.Name(name=name), attr=attribute):
                self._field(name, attribute, nested, macro)
            case nodes.Getitem(node=nodes.Name(name=name), arg=nodes.Const(value=str(attribute))):
                self._field(name, attribute, nested, macro)
            case nodes.Getitem(node=nodes.Name(name=name), arg=index) if (
                not macro and name not in self._own and not isinstance(index, nodes.Slice)
            ):
                self.reads.indexed.add(name)
                self.looks.add(id(node))
                self.visit(index, nested, macro)
            case nodes.Name():
                self._name(node.name, nested, macro)
            case nodes.NSRef():
                self.reads.written.add((node.name, node.attr))
            case _:
                for child in node.iter_child_nodes():
                    self.visit(child, nested, macro)

    def _name(self, name: str, nested: bool, macro: bool) -> None:
        if name in _REFUSED_NAMES or (name == "loop" and not nested):
            raise _NotKnownError
        if name == "loop" or (name == self._target and not macro):
            return
        self.reads.names.add(name)
        if name in self._macros and name not in self._seen:
            self._seen.add(name)
            if len(self._macros[name]) > 1:
                raise _NotKnownError
            called = self._macros[name][0]
            for node in (*called.defaults, *called.body):
                self.visit(node, macro=True)

    def _field(self, name: str, attribute: str, nested: bool, macro: bool) -> None:
        if name in self._macros or name in _REFUSED_NAMES:
            raise _NotKnownError
        if name != self._target or macro:
            self.reads.fields.add((name, attribute))

    def _of_loop(self, name: str, nested: bool, macro: bool) -> None:
        if nested:
            return
        if macro or name not in _BEHIND | _AHEAD:
            raise _NotKnownError
        if name in _AHEAD:
            self.reads.ahead = 1

    def _limit(self, number: nodes.Expr, operator: str, limit: nodes.Getattr) -> bool:
        """Whether this compares a round's number with a field of a variable."""
        match number, limit.node:
            case nodes.Getattr(node=nodes.Name(name="loop"), attr="index0" | "index" as kind), nodes.Name(
                name=name
            ):
                if operator not in _ORDER or name in self._own or name in self._macros or name in _REFUSED_NAMES:
                    return False
                self.reads.limits.add(Limit(name, limit.attr, operator, int(kind == "index")))
                return True
        return False


class _Looks(NodeTransformer):
    """Has what is looked up in lists from outside the loop noted."""

    def __init__(self, looks: set[int], environment: ImmutableSandboxedEnvironment) -> None:
        self._looks = looks
        self._environment = environment

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if id(node) not in self._looks:
            return node
        assert isinstance(node.node, nodes.Name)
        arguments = [nodes.Const(node.node.name, lineno=node.lineno), node.arg]
        return nodes.Filter(node.node, LOOK, arguments, [], None, None, lineno=node.lineno)


def vocabulary(tree: nodes.Template) -> tuple[frozenset[str], tuple[str, ...]]:
    """All names and field names, and the strings that the template looks for in others."""
    names = {node.name for node in tree.find_all(nodes.Name)}
    names |= {node.attr for node in tree.find_all(nodes.Getattr)}
    names |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    looked_for: list[str] = []
    for compare in tree.find_all(nodes.Compare):
        looked_for += _constants([compare.expr, *(operand.expr for operand in compare.ops)])
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _SEARCHES:
            looked_for += _constants(call.args)
    return frozenset(names), tuple(looked_for)


def _constants(expressions: Iterable[nodes.Expr]) -> list[str]:
    return [e.value for e in expressions if isinstance(e, nodes.Const) and isinstance(e.value, str)]


def time_of_day(tree: nodes.Template) -> str | None:
    """The form in which the template asks for the time of day, None if it asks for the date at most."""
    for call in tree.find_all(nodes.Call):
        match call:
            case nodes.Call(node=nodes.Name(name="strftime_now"), args=[nodes.Const(value=str(form))]):
                if _TIMES.search(form):
                    return form
    return None
