"""What the operator sees of the store."""

from __future__ import annotations

from snapshot_rig import HEAD, Engine, chat, one_shot, prompt, words

from worker.snapshot_view import list_slots, slot_info, snapshot_tree


def test_a_slot_tells_what_it_holds():
    engine = Engine(4)
    engine.play(prompt(words(1, 32), words(2, 10), tenant="t"))
    engine.play(prompt(words(1, 32), words(2, 10), words(3, 3), tenant="t"))
    head, middle = engine.slots_at(32, 42)
    engine.clock.now += 5
    info = slot_info(engine.store, middle)
    assert (info.state, info.generation, info.tenant, info.kind) == ("ready", 1, "t", "message")
    assert (info.tokens, info.messages, info.blocks, info.parent_slot, info.children) == (42, 2, 11, head, 1)
    assert (info.total_bytes, info.own_bytes) == (1100, 100)
    assert (info.hits, info.busy, info.pinned) == (1, 0, False)
    assert (info.created_age_seconds, info.used_age_seconds) == (6.0, 5.0)
    assert len(info.digest) == 8
    assert slot_info(engine.store, head).children == 1


def test_a_reserved_slot_is_listed_without_a_snapshot():
    engine = Engine(4)
    reservation = engine.keeping.reserve()
    assert slot_info(engine.store, reservation.slot).state == "reserved"
    assert slot_info(engine.store, reservation.slot).tokens == 0


def test_listing_pages_through_the_slots_in_use():
    engine = Engine(8)
    for who in range(5):
        engine.play(one_shot(10 + who))
    engine.clearing.evict([1])
    page, cursor, total = list_slots(engine.store, 0, 2)
    assert ([info.slot for info in page], cursor, total) == ([0, 2], 3, 4)
    page, cursor, _ = list_slots(engine.store, cursor, 2)
    assert ([info.slot for info in page], cursor) == ([3, 4], None)
    assert list_slots(engine.store, 99, 0)[0] == []


def test_the_tree_shows_what_extends_what():
    engine = Engine(8)
    engine.play(chat(1))
    engine.play(chat(3))
    engine.play(prompt(HEAD, words(99, 9)))
    engine.play(one_shot(70))
    head, forked, end = engine.slots_at(30, 39, 90)
    (between,) = engine.slots_at(50)
    assert [(node.tokens, node.parent_slot, node.level) for node in snapshot_tree(engine.store)] == [
        (12, None, 0),
        (30, None, 0),
        (39, head, 1),
        (50, head, 1),
        (90, between, 1),
    ]
    engine.clearing.pin(forked)
    engine.finding.begin_restore(end, engine.store.slots[end].generation)
    by_slot = {node.slot: node for node in snapshot_tree(engine.store)}
    assert [(by_slot[slot].pinned, by_slot[slot].busy) for slot in (forked, end)] == [(True, 0), (False, 1)]


def test_a_tree_deeper_than_nested_json_can_be():
    engine = Engine(400, 4096)
    for turns in range(1, 301):
        engine.play(prompt(*([[1, 2]] * turns)))
    nodes = snapshot_tree(engine.store)
    assert [node.tokens for node in nodes] == list(range(2, 602, 2))
    assert {node.level for node in nodes} == {0}
