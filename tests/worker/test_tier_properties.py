"""Whatever happens to a worker with slower tiers, its answers and accounts are right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tier_rig import TierRig, break_file, chat


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(), kind=st.sampled_from(["plain", "recurs", "divisible"]), host_bytes=st.sampled_from([0, 500])
)
def test_answers_and_accounts_are_right_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kind: str, host_bytes: int
):
    """The rig compares every state that is read, kept or loaded with that of its tokens."""
    folder = tmp_path_factory.mktemp("tiers")
    disk_bytes = data.draw(st.sampled_from([8_000, 30_000, 1 << 20]))

    def begin() -> TierRig:
        return TierRig(
            folder,
            blocks=40,
            slots=4,
            entries=5 if kind == "recurs" else 0,
            divisible=kind == "divisible",
            disk_bytes=disk_bytes,
            host_bytes=host_bytes,
        )

    rig = begin()
    try:
        for _ in range(data.draw(st.integers(4, 12))):
            rig = act(rig, begin, data)
        rig.settle()
    finally:
        rig.close()


def act(rig: TierRig, begin: Callable[[], TierRig], data: st.DataObject) -> TierRig:
    """One of all that may happen to a worker; the one that goes on from there."""

    def begin_again() -> TierRig:
        rig.close()
        return begin()

    files = sorted(rig.disk.folder.glob("*.safetensors"))
    match data.draw(
        st.sampled_from(("ask", "ask", "together", "settle", "kill", "break", "remove", "flush", "evict"))
    ):
        case "ask":
            request = rig.serve(chat(data.draw(st.integers(1, 4)), who=data.draw(st.integers(0, 3))))
            rig.assert_answered(request)
        case "together":
            asked = [rig.generate(chat(data.draw(st.integers(1, 4)), who=who)) for who in range(3)]
            rig.run()
            for request in asked:
                rig.assert_answered(request)
        case "settle":
            rig.settle()
        case "kill":
            rig = begin_again()
            rig.check_disk()
        case "break" if files:
            how = data.draw(st.sampled_from(["flipped", "truncated", "empty", "header"]))
            break_file(data.draw(st.sampled_from(files)), how)
            rig = begin_again()
        case "remove" if files:
            data.draw(st.sampled_from(files)).unlink()
            rig = begin_again()
        case "flush":
            rig.ask("flush")
        case "evict":
            rig.ask("evict", slots=[s.slot for s in rig.store.slots.snapshots()][:1])
    return rig
