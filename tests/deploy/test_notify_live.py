"""What real processes tell their service manager, up to the hung step that its watchdog is there for.

That they also say when they stop is seen where they do: at the end of the fixture that they come from.
"""

from __future__ import annotations

import json
import signal

from daemon import until
from http_client import user
from services import WATCHDOG_SECONDS, Services


def test_they_say_what_they_do_until_they_are_ready(services: Services):
    assert any(said.startswith("STATUS=loading weights") for said in services.said["worker"])
    assert services.said["worker"][-2:] == ["READY=1", f"STATUS=serving {services._model}"]
    assert services.said["gateway"][0] == "READY=1", "it answers before there is a worker"


def test_signs_of_life_go_on_while_nothing_is_asked(services: Services):
    for service in (services.worker, services.gateway):
        service.forget()
        for _ in range(3):
            service.hear_until("WATCHDOG=1")


def test_a_hung_step_silences_the_worker_and_its_end_is_told_and_mended(services: Services):
    assert services.client.chat([user("Does it answer?")]).status == 200  # from now on it knows what a step takes
    services.hold()
    waiting = services.client.send([user("Does it answer?")])
    until(lambda: services.health()["requests_running"] == 1, "the request runs")
    for _ in range(10):
        if not services.worker.hear(WATCHDOG_SECONDS):
            break
    else:
        raise AssertionError("signs of life although the step hangs")
    assert services.health()["phase"] in ("ready", "hung"), "its other threads go on"
    services.worker.hear_until("WATCHDOG=trigger")
    assert services.health()["phase"] == "failed"
    services.gateway.forget()
    services.gateway.hear_until("WATCHDOG=1")
    assert services.worker.stop(signal.SIGABRT) == -signal.SIGABRT, "what systemd does then"
    answer = waiting.getresponse()
    assert answer.status == 503
    assert json.loads(answer.read())["error"]["code"] == "worker_unavailable"
    waiting.close()
    services.release()
    services.worker = services.start_worker()
    services.worker.hear_until("READY=1")
    services.gateway.hear_until("STATUS=serving")
    assert services.client.chat([user("Does it answer?")]).status == 200
