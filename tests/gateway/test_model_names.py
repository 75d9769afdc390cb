"""Which model names are listed, served and refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_worker import FakeWorker
from served import Served

from gateway.config import GatewaySettings
from gateway.service import model_names


@pytest.fixture
def settings(model_dir: Path, short_run_dir: Path) -> GatewaySettings:
    return GatewaySettings(
        model=str(model_dir), run_dir=short_run_dir, strict_model=True, served_model_name=("mine", "yours")
    )


async def test_strict_serving_knows_every_listed_name_and_no_other(served: Served, worker: FakeWorker):
    listed = await (await served.http.get(served.url + "/v1/models")).json()
    for name in [entry["id"] for entry in listed["data"]]:
        assert (await (await served.chat(model=name)).json())["model"] == name
    assert (await (await served.chat()).json())["model"] == "mine"
    refused = await served.chat(model="another")
    assert refused.status == 404
    assert (await refused.json())["error"]["code"] == "model_not_found"
    assert (await served.post("/v1/completions", {"prompt": "x", "model": "another"})).status == 404


def test_a_gguf_file_is_listed_with_and_without_its_ending(tmp_path: Path):
    names = model_names(GatewaySettings(model="/models/a.Q4.gguf", run_dir=tmp_path))
    assert names == ("/models/a.Q4.gguf", "a.Q4.gguf", "a.Q4")
