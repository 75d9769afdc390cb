"""Templates that gather their text in a field of a namespace and print it once, at the end.

Each addition, `set ns.text = ns.text ~ more`, reports how long the text has become, so that it shows which message's
it is once the whole is printed.
"""

from __future__ import annotations

from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

# What is written inside these is text of something else.
CAPTURING = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)


class Gathered:
    """What one field holds, None if that is not known, and `spans` of (owner, length) that cover it."""

    def __init__(self) -> None:
        self.text: str | None = ""
        self.spans: list[tuple[int, int]] = []

    def grew(self, value: object, owner: int) -> None:
        """The field has become `value`; what is new in it is `owner`'s. One that begins otherwise is not followed."""
        if self.text is None or type(value) is not str or not value.startswith(self.text):
            self.text = None
            return
        added, self.text = len(value) - len(self.text), value
        if self.spans and self.spans[-1][0] == owner:
            self.spans[-1] = (owner, self.spans[-1][1] + added)
        elif added:
            self.spans.append((owner, added))


def report_growth(tree: nodes.Template, report: str, environment: ImmutableSandboxedEnvironment) -> None:
    """Add a report, a filter of that name, behind each addition to a field that is changed by additions alone."""
    assigned = [node for node in tree.find_all(nodes.Assign) if isinstance(node.target, nodes.NSRef)]
    other = {_name(node) for node in assigned if not _adds(node)}
    followed = [node for node in assigned if _name(node) not in other]

    def visit(node: nodes.Node) -> None:
        for field, value in list(node.iter_fields()):
            children = value if isinstance(value, list) else [value]
            for child in children:
                if isinstance(child, nodes.Node) and not isinstance(child, CAPTURING):
                    visit(child)
            if isinstance(value, list):
                setattr(node, field, [each for child in value for each in (child, *_report(child))])

    def _report(child: object) -> list[nodes.Node]:
        if not isinstance(child, nodes.Assign) or not any(child is each for each in followed):
            return []
        assert isinstance(child.target, nodes.NSRef)
        line, name, attribute = child.lineno, child.target.name, child.target.attr
        value = nodes.Getattr(nodes.Name(name, "load", lineno=line), attribute, "load", lineno=line)
        called = [nodes.Const(_name(child), lineno=line)]
        return [nodes.Output([nodes.Filter(value, report, called, [], None, None, lineno=line)], lineno=line)]

    visit(tree)
    tree.set_environment(environment)


def _name(node: nodes.Assign) -> str:
    assert isinstance(node.target, nodes.NSRef)
    return f"{node.target.name}.{node.target.attr}"


def _adds(node: nodes.Assign) -> bool:
    """Whether this appends to what it assigns to."""
    match node.node:
        case nodes.Concat(nodes=[nodes.Getattr(node=nodes.Name(name=name), attr=attribute), *_]):
            return f"{name}.{attribute}" == _name(node)
        case nodes.Add():
            first: nodes.Expr = node.node
            while isinstance(first, nodes.Add):
                first = first.left
            return (
                isinstance(first, nodes.Getattr)
                and isinstance(first.node, nodes.Name)
                and f"{first.node.name}.{first.attr}" == _name(node)
            )
    return False
