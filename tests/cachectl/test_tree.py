"""`cachectl tree` shows which snapshot extends which, in chains too."""

from __future__ import annotations

from cachectl.render import tree
from protocol.control import TreeNode


def node(slot: int, parent: int | None, tokens: int) -> TreeNode:
    return TreeNode(slot, parent, 0, f"{slot:08x}", "message", tokens, 1, 0, False, 0)


def starts(text: str) -> dict[int, int]:
    """The column where each slot is written."""
    lines = text.split("\n")[1:]
    return {int(line.split("slot ")[1].split()[0]): line.index("slot ") for line in lines}


def test_a_child_stands_under_its_parent_and_to_the_right_of_it():
    nodes = [node(7, None, 10), node(2, 7, 20), node(5, 2, 30), node(1, 2, 40), node(9, None, 12)]
    text = tree(nodes)
    column = starts(text)
    assert column[7] == column[9] < column[2] < column[5] == column[1]
    assert list(column) == [7, 2, 5, 1, 9]
    header, *lines = text.split("\n")
    place = header.index("PARENT") + len("PARENT") - 1
    assert [line[place] for line in lines] == ["-", "7", "2", "2", "-"]


def test_a_long_chain_stays_readable():
    text = tree([node(slot, slot - 1 if slot else None, 10 * slot) for slot in range(400)])
    assert max(map(len, text.split("\n"))) < 120
    assert starts(text)[1] > starts(text)[0]


def test_nothing_is_a_header_alone():
    assert tree([]).startswith("SNAPSHOT")
