"""The services that all end-to-end tests of the kit share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "e2e"))  # chat_model.py, daemon.py, http_client.py
sys.path.append(str(Path(__file__).parents[1] / "worker"))  # tiny_models.py

from chat_model import make_chat_model
from services import Services


@pytest.fixture(scope="package")
def _services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    services = Services(make_chat_model(tmp_path_factory.mktemp("model") / "tiny-chat"))
    try:
        yield services
        for service in (services.gateway, services.worker):
            service.forget()
            assert service.stop() == 0, service.log()
            service.hear_until("STOPPING=1")
    finally:
        services.close()


@pytest.fixture
def services(_services: Services) -> Iterator[Services]:
    """A gateway and a worker that serve, and whose passes run."""
    yield _services
    _services.release()
