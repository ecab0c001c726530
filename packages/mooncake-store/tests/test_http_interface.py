"""The HTTP interface around the objects: its document, its pages, its numbers, and who may use it."""

import re
import socket
import ssl

import httpx
import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from mooncake_store import AsyncStore
from mooncake_store.errors import ConfigError
from mooncake_store.http.app import build_app
from mooncake_store.http.openapi import document
from mooncake_store.http.problems import STATUS
from mooncake_store.http.server import HttpServer, HttpTls
from mooncake_transfer.listening import listen

MIB = 1 << 20
PAGES = {"/", "/docs", "/openapi.json"}


@pytest.fixture
def store(world):
    return world.store(lend=MIB)


@pytest.fixture
def serve(world, store):
    def served(**options):
        server = world.stack.enter_context(HttpServer(store, **options))
        return world.stack.enter_context(httpx.Client(base_url=server.url, timeout=20))

    return served


def test_the_document_names_every_route_and_no_other(store):
    app = AsyncStore(store)
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in build_app(app).routes
        if isinstance(route, Route) and route.path not in PAGES
        for method in route.methods
    }
    app.stop_threads()
    described = document("1", secret=False)["paths"]
    methods = {"get", "put", "post", "delete", "head"}
    assert {
        (path, method) for path, item in described.items() for method in item if method in methods
    } == routes


def test_every_reference_in_the_document_leads_somewhere_and_every_error_has_a_status():
    described = document("1", secret=True)
    schemas = set(described["components"]["schemas"])
    assert set(re.findall(r"#/components/schemas/(\w+)", str(described))) == schemas
    assert described["security"] == [{"token": []}]
    assert (
        "key-not-found" in described["paths"]["/v1/objects/{key}"]["get"]["responses"]["404"]["description"]
    )
    assert all(400 <= status < 600 for status in STATUS.values())


def test_the_pages_load_nothing_from_elsewhere(serve):
    http = serve()
    for page in ("/", "/docs"):
        answer = http.get(page)
        assert answer.status_code == 200
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        files = re.findall(r'(?:src|href)="([^"#]+)"', answer.text)
        assert not [file for file in files if "//" in file]
        for file in files:
            if not file.startswith("data:"):
                assert http.get(f"/{file}").status_code == 200, file
    assert http.get("/openapi.json").json()["openapi"] == "3.0.3"
    assert http.get("/web/../server.py").status_code == 404
    assert http.get("/web/%2e%2e/server.py").status_code == 404


def test_numbers_are_those_of_the_store(serve, store):
    http = serve()
    store.put("a", bytes(5000))
    store.get("a")
    stats = http.get("/v1/stats").json()
    assert (stats["objects"], stats["hits"], stats["used_bytes"]) == (1, 1, 8192)
    (segment,) = http.get("/v1/segments").json()["segments"]
    assert segment["capacity_bytes"] == MIB
    report = http.get("/v1/report").json()
    assert report["stats"]["objects"] == 1
    hot = report["hot"][0]
    assert (hot["key"], hot["key_hex"], hot["nbytes"]) == ("a", "61", 5000)
    assert report["requests"]["Commit"]["count"] == 1
    assert http.get("/health").json() == {"status": "ok"}
    families = list(text_string_to_metric_families(http.get("/metrics").text))
    samples = {sample.name: sample.value for family in families for sample in family.samples}
    assert samples["mooncake_store_master_up"] == 1
    assert samples["mooncake_store_master_objects"] == 1
    assert samples["mooncake_store_client_stored_total"] == 1
    assert samples["mooncake_transfer_regions"] >= 1


def test_a_token_is_asked_for_everywhere_but_where_there_is_nothing_to_tell(serve):
    http = serve(token="secret")
    paths = ["/v1/objects/a", "/v1/stats", "/v1/segments", "/v1/report", "/metrics"]
    for path in paths:
        answer = http.get(path)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), path
        assert answer.json()["type"] == "urn:mooncake-store:unauthorized"
        assert http.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert http.put("/v1/objects/a", content=b"1").status_code == 401
    assert [http.get(path).status_code for path in ("/", "/docs", "/health")] == [200, 200, 200]
    http.headers["Authorization"] = "Bearer secret"
    assert http.put("/v1/objects/a", content=b"1").status_code == 201
    assert [http.get(path).status_code for path in paths] == [200] * len(paths)


def test_a_master_that_is_away_is_a_problem_and_a_metric(world):
    engine = world.engine()
    master = world.store(engine)
    http_server = world.stack.enter_context(HttpServer(world.store(world.engine(), engine.address)))
    master.close()
    with httpx.Client(base_url=http_server.url, timeout=20) as http:
        answer = http.get("/v1/stats")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["type"] == "urn:mooncake-store:master-unreachable"
        assert http.get("/health").status_code == 503
        assert "mooncake_store_master_up 0.0" in http.get("/metrics").text


def test_https_shows_its_certificate_and_asks_for_one(serve, tmp_path):
    ca = trustme.CA()
    server, client = ca.issue_cert("127.0.0.1"), ca.issue_cert("client@test.invalid")
    ca.cert_pem.write_to_path(tmp_path / "ca")
    server.cert_chain_pems[0].write_to_path(tmp_path / "cert")
    server.private_key_pem.write_to_path(tmp_path / "key")
    client.private_key_and_cert_chain_pem.write_to_path(tmp_path / "client")
    tls = HttpTls(
        certificate_file=str(tmp_path / "cert"),
        key_file=str(tmp_path / "key"),
        client_ca_file=str(tmp_path / "ca"),
    )
    url = str(serve(tls=tls).base_url)
    assert url.startswith("https://")
    context = ssl.create_default_context(cafile=str(tmp_path / "ca"))
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{url}/health", verify=context, timeout=20)
    context.load_cert_chain(str(tmp_path / "client"))
    assert httpx.get(f"{url}/health", verify=context, timeout=20).status_code == 200


def test_an_address_or_certificate_that_does_not_do_is_refused(store, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="in use"):
        HttpServer(store, port=taken.getsockname()[1])
    with listen("::1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot serve HTTP on \[::1\]:{port}: .* in use"):
            HttpServer(store, "::1", port)
    with pytest.raises(ConfigError, match="cannot be used"):
        HttpServer(store, tls=HttpTls(certificate_file=str(tmp_path / "no"), key_file=str(tmp_path / "no")))
