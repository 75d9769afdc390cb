"""Where there are API keys, the status page is for admins; where metrics have a port of their own, it is there."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from test_api_keys import ADMIN, FILE, A, write

from gateway.app import build_metrics_runner
from gateway.config import GatewaySettings


@pytest.fixture
def settings(model_dir: Path, short_run_dir: Path, tmp_path: Path) -> GatewaySettings:
    keys = write(tmp_path / "keys.toml", FILE)
    return GatewaySettings(model=str(model_dir), run_dir=short_run_dir, ui=True, api_keys=keys)


@pytest.mark.parametrize(("key", "status"), [("", 401), ("nobody's", 401), (A, 403), (ADMIN, 200)])
async def test_what_it_shows_needs_an_admins_key_and_the_page_itself_none(served, key, status):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with served.http.get(f"{served.url}/ui", headers=headers) as page:
        assert page.status == 200
    async with served.http.get(f"{served.url}/ui/events", headers=headers) as events:
        assert events.status == status


class TestOnThePortOfMetrics:
    @pytest.fixture
    def settings(self, settings: GatewaySettings) -> GatewaySettings:
        return settings.model_copy(update={"metrics_port": 1})

    async def test_it_is_there_and_not_on_the_public_one(self, served):
        admin = {"Authorization": f"Bearer {ADMIN}"}
        async with served.http.get(f"{served.url}/ui", headers=admin) as public:
            assert public.status == 404
        runner = build_metrics_runner(served.gateway)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        try:
            async with aiohttp.ClientSession() as http:
                for path in ("/ui", "/ui/events", "/metrics"):
                    async with http.get(f"http://127.0.0.1:{port}{path}") as response:
                        assert response.status == 200
        finally:
            await runner.cleanup()
