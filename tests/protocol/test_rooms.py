"""Who may import whom: the rooms share `protocol` and nothing else, and only the worker knows torch."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("protocol", "gateway", "worker", "cachectl")
TENSORS = {"torch", "triton", "transformers", "safetensors"}


def imported(path):
    """The top-level names that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module.split(".")[0]


def files():
    return [(room, path) for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


@pytest.mark.parametrize(
    ("room", "path"), files(), ids=lambda value: value if isinstance(value, str) else value.name
)
def test_a_file_imports_no_foreign_room_and_no_tensors_outside_the_worker(room, path):
    names = set(imported(path))
    assert not names & (set(ROOMS) - {room, "protocol"})
    if room != "worker":
        assert not names & TENSORS


def test_the_check_sees_every_room():
    assert {room for room, _ in files()} == set(ROOMS)
