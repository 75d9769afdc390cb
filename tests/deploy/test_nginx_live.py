"""The nginx site in front of a real gateway: what it lets through, and streams that outlast its read timeout."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from daemon import until
from http_client import Answer, Stream, joined, user
from services import Services

from protocol.limits import MAX_BODY_BYTES

SITE = Path(__file__).parents[2] / "deploy" / "nginx" / "prefixd.conf"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
READ_TIMEOUT_SECONDS = 2  # instead of half an hour; silence of a stream is scaled down too, and further

pytestmark = pytest.mark.skipif(
    NGINX is None or shutil.which("openssl") is None,
    reason="no nginx or openssl here (Debian packages of that name)",
)


@dataclass(frozen=True)
class Proxy:
    """A running nginx, reached over TLS."""

    port: int
    plain_port: int
    trust: ssl.SSLContext

    def open(self, method: str, path: str, body: object = None, **headers: str) -> http.client.HTTPSConnection:
        """Send a request; the answer is still to be read."""
        connection = http.client.HTTPSConnection("localhost", self.port, timeout=60, context=self.trust)
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json", **headers})
        return connection

    def request(self, method: str, path: str, body: object = None, **headers: str) -> Answer:
        connection = self.open(method, path, body, **headers)
        try:
            response = connection.getresponse()
            return Answer(response.status, {n.lower(): v for n, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def stream(self, content: str, **fields: object) -> Stream:
        body = {"messages": [user(content)], "stream": True, "temperature": 0, "max_tokens": 12, **fields}
        connection = self.open("POST", "/v1/chat/completions", body)
        return Stream(connection, connection.getresponse())


@pytest.fixture(scope="module")
def proxy(_services: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("nginx")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*make, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    port, plain_port = free_ports(2)
    site = SITE.read_text()
    for written, ours in (
        ("127.0.0.1:8080", _services.client.url.removeprefix("http://")),
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("listen 80", f"listen 127.0.0.1:{plain_port}"),
        ("/etc/ssl/certs/llm.example.org.pem", str(certificate)),
        ("/etc/ssl/private/llm.example.org.key", str(key)),
        ("proxy_read_timeout 30m", f"proxy_read_timeout {READ_TIMEOUT_SECONDS}s"),
    ):
        assert written in site
        site = site.replace(written, ours)
    places = "\n".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    conf = folder / "nginx.conf"
    conf.write_text(
        f"daemon off;\nmaster_process off;\npid {folder}/pid;\nerror_log stderr warn;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{places}\n{site}\n}}\n"
    )
    process = subprocess.Popen([NGINX, "-p", folder, "-c", conf], stderr=subprocess.PIPE)
    try:
        until(lambda: process.poll() is not None or is_open(port), "nginx listens")
        assert process.poll() is None, process.stderr.read()
        yield Proxy(port, plain_port, ssl.create_default_context(cafile=certificate))
    finally:
        process.terminate()
        process.communicate(timeout=30)


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_stream_outlasts_the_read_timeout_and_comes_piece_by_piece(services: Services, proxy: Proxy):
    """K-ST4: while nothing is computed, comments arrive one by one and keep the proxy from giving up."""
    services.hold()
    with proxy.stream("Is this long?") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        outlasted = time.monotonic() + 1.2 * READ_TIMEOUT_SECONDS
        while time.monotonic() < outlasted:
            line = stream._response.readline()
            assert line, "the proxy has given up"
            assert not re.search(rb'"content":"[^"]', line), "nothing has been computed yet"
        services.release()
        events = list(stream)
        assert stream.is_done
    assert joined(events) == services.client.cold([user("Is this long?")]).text


def test_the_read_timeout_is_in_force_and_then_the_request_is_cancelled(services: Services, proxy: Proxy):
    services.hold()
    body = {"messages": [user("All at once?")]}
    assert proxy.request("POST", "/v1/chat/completions", body).status == 504
    services.release()
    services.wait_idle()
    assert services.stats()["requests"]["cancelled"] >= 1


def test_hanging_up_on_the_proxy_hangs_up_on_the_gateway(services: Services, proxy: Proxy):
    cancelled = services.stats()["requests"]["cancelled"]
    with proxy.stream("Without end?", max_tokens=10_000, ignore_eos=True) as stream:
        stream.take_text(2)
    until(lambda: services.stats()["requests"]["cancelled"] > cancelled, "the request is cancelled")


def test_requests_share_connections_to_the_gateway(services: Services, proxy: Proxy):
    for _ in range(10):
        assert proxy.request("GET", "/health").status == 200
    port = int(services.client.url.rsplit(":", 1)[1])
    assert 1 <= connections_to(port) <= 3


def connections_to(port: int) -> int:
    """Established ones, seen from the client's side."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2] == f"0100007F:{port:04X}" and row[3] == "01" for row in rows)


def test_what_goes_through_and_what_does_not(services: Services, proxy: Proxy):
    answer = proxy.request("POST", "/v1/chat/completions", {"messages": [user("Hello")], "max_tokens": 3})
    assert answer.choices
    assert answer.outcome
    for path, status in (("/", 200), ("/ready", 200), ("/v1/models", 200), ("/metrics", 404), ("/v2", 404)):
        assert proxy.request("GET", path).status == status, path
    assert services.client.get("/metrics").status == 200


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(services: Services, proxy: Proxy):
    assert re.search(r"client_max_body_size (\d+)m;", SITE.read_text())[1] == str(MAX_BODY_BYTES >> 20)
    too_large = str(MAX_BODY_BYTES + 1)
    assert proxy.request("POST", "/v1/messages", **{"Content-Length": too_large}).status == 413


def test_plain_http_is_sent_to_tls(proxy: Proxy):
    connection = http.client.HTTPConnection("127.0.0.1", proxy.plain_port, timeout=60)
    connection.request("GET", "/v1/models", headers={"Host": "localhost"})
    response = connection.getresponse()
    assert (response.status, response.getheader("Location")) == (301, "https://localhost/v1/models")
    connection.close()
