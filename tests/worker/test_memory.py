"""What of a card's memory keys and values get."""

import pytest
import torch

from protocol.errors import SettingsError
from worker.memory import slot_count, split_memory

CARD = torch.device("cuda")


@pytest.fixture
def free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (1000, 5000))


def test_a_card_gives_all_that_passes_leave(free, caplog):
    caplog.set_level("INFO")
    assert split_memory("auto", 10, 0, 8, CARD, 10, needed_bytes=300) == (70, 0)
    assert split_memory("auto", 10, 70, 4, CARD, 10, needed_bytes=300) == (35, 5)
    assert "of 1000B free on the card 700B are for keys, values and states" in caplog.text


def test_where_it_is_not_known_what_passes_need_a_share_is_left(free):
    assert split_memory("auto", 10, 0, 8, CARD, 10) == (85, 0)


def test_more_than_the_card_has_is_refused_with_the_numbers(free):
    assert split_memory(700, 10, 0, 8, CARD, 10, needed_bytes=300) == (70, 0)
    with pytest.raises(SettingsError, match="701B is more than the 700B that the card has"):
        split_memory(701, 10, 0, 8, CARD, 10, needed_bytes=300)
    with pytest.raises(SettingsError, match="less than 3 blocks"):
        split_memory("auto", 10, 0, 8, CARD, 10, needed_bytes=2000)


def test_slots_are_few_where_each_takes_a_state():
    assert slot_count(None, recurs=True) < slot_count(None, recurs=False)
    assert [slot_count(asked, recurs=recurs) for asked in (0, 7) for recurs in (False, True)] == [0, 0, 7, 7]
