"""What times the engine on a card, around a small model on this machine."""

from types import SimpleNamespace

import pytest
import torch
from engine_passes import Goal, Row
from engine_requests import Served
from random_model import SHAPE, random_weights

from worker.cuda.dense import DenseModel
from worker.cuda.ops import TorchOps
from worker.cuda.runner import CudaRunner
from worker.kv_cache import BLOCK_TOKENS, KVCache, block_bytes
from worker.model_config import parse_config

CPU = torch.device("cpu")
SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}


@pytest.fixture
def served():
    config = parse_config(SHAPE | SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2})
    with torch.inference_mode():
        model = DenseModel(config, random_weights(config, CPU, torch.float32), torch.float32, CPU, 512)
        runner = CudaRunner(model, KVCache(config, 64, torch.float32, CPU), TorchOps(), (128, 256))
        token_bytes = block_bytes(config, torch.float32) // BLOCK_TOKENS
        bench = SimpleNamespace(config=config, runner=runner, states=None, state_bytes=0, token_bytes=token_bytes)
        yield Served(bench)


def test_a_conversation_that_grows_starts_from_its_snapshot(served, capsys):
    history = [list(range(40)), list(range(20))]
    assert served.first_token(history, 0) > 0
    assert served.first_token([*history, [7] * 30], 60) > 0
    assert capsys.readouterr().out == ""
    served.first_token([*history, [8] * 30], 90)
    assert capsys.readouterr().out == "  started from 60 of 90 tokens\n"
    assert served.mean_ms("commit") > 0


def test_each_of_the_sequences_that_decode_has_a_mean(served):
    means = served.token_ms([[1] * 40, [2] * 40])
    assert len(means) == 2
    assert min(means) > 0
    assert served.store.snapshot_bytes == 0


def test_a_row_says_how_far_from_the_floor_it_is():
    assert str(Row("cold", 6.0, 5.0, 4.0, *Goal(7.0))).split() == [
        "cold",
        "6.00",
        "5.00",
        "4.00",
        "7.00",
        "-",
        "1.50",
    ]
    assert str(Row("copy", 6.0, 5.0, None, *Goal())).split() == ["copy", "6.00", "5.00", "-", "-", "-", "-"]
    assert len(Row.title()) == len(str(Row("x", 1, 1, 1, 1, 1)))
