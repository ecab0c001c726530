"""Objects over HTTP, asked for by independent clients: httpx and curl."""

import itertools
import shutil
import subprocess

import httpx
import pytest

from mooncake_store import StoreConfig
from mooncake_store.errors import KeyNotFound
from mooncake_store.http.server import HttpServer
from mooncake_store.http.service import HttpLimits
from mooncake_store.policy import TenantPolicy
from mooncake_store.value_reader import ValueReader

MIB = 1 << 20
SMALL = HttpLimits(max_object_bytes=300_000, max_pending_bytes=400_000, max_batch_keys=3, chunk_bytes=4096)


@pytest.fixture
def store(world):
    return world.store(lend=4 * MIB)


@pytest.fixture
def http(world, store):
    server = world.stack.enter_context(HttpServer(store, limits=SMALL))
    return world.stack.enter_context(httpx.Client(base_url=server.url, timeout=20))


def problem(answer, status, kind):
    """The body of an answer that tells this problem."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["type"] == f"urn:mooncake-store:{kind}"
    assert body["status"] == status
    return body


def test_a_value_put_is_read_whole_with_its_size_and_removed(http, store):
    value = bytes(range(256)) * 500
    assert http.put("/v1/objects/a", content=value).status_code == 201
    assert store.get("a") == value
    answer = http.get("/v1/objects/a")
    assert (answer.status_code, answer.content) == (200, value)
    head = http.head("/v1/objects/a")
    assert (head.status_code, head.headers["content-length"], head.content) == (200, "128000", b"")
    assert http.delete("/v1/objects/a").status_code == 204
    problem(http.get("/v1/objects/a"), 404, "key-not-found")
    problem(http.delete("/v1/objects/a"), 404, "key-not-found")
    missing = http.head("/v1/objects/a")
    assert (missing.status_code, missing.content) == (404, b"")


def test_an_empty_value_is_a_value(http):
    assert http.put("/v1/objects/empty", content=b"").status_code == 201
    answer = http.get("/v1/objects/empty")
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("model/7/block%201", b"model/7/block 1"),
        ("%00%FF%2F%3F", b"\x00\xff/?"),
        ("%C3%A4", "ä".encode()),
        ("00ff2f?key_encoding=hex", b"\x00\xff/"),
    ],
)
def test_keys_are_any_bytes(http, store, path, key):
    assert http.put(f"/v1/objects/{path}", content=b"1").status_code == 201
    assert store.get(key) == b"1"
    assert http.get(f"/v1/objects/{path}").content == b"1"


@pytest.mark.parametrize(
    ("header", "part", "said"),
    [
        ("bytes=0-9", slice(0, 10), "bytes 0-9/10000"),
        ("bytes=9990-", slice(9990, None), "bytes 9990-9999/10000"),
        ("bytes=-7", slice(-7, None), "bytes 9993-9999/10000"),
        ("bytes=4000-20000", slice(4000, None), "bytes 4000-9999/10000"),
    ],
)
def test_a_range_is_read_alone(http, store, content, header, part, said):
    value = content(b"r", 1, 10_000)
    store.put("r", value)
    answer = http.get("/v1/objects/r", headers={"Range": header})
    assert (answer.status_code, answer.content) == (206, value[part])
    assert answer.headers["content-range"] == said


def test_a_range_outside_of_the_value_is_refused_and_a_strange_one_passed_over(http, store, eventually):
    store.put("r", bytes(100))
    answer = http.get("/v1/objects/r", headers={"Range": "bytes=100-"})
    problem(answer, 416, "range-not-satisfiable")
    assert answer.headers["content-range"] == "bytes */100"
    assert http.get("/v1/objects/r", headers={"Range": "lines=1-2"}).status_code == 200
    eventually(lambda: store.stats().leases == 0)


def test_a_taken_key_is_an_error_or_stays_or_is_replaced(http, store):
    store.put("a", b"1")
    said = problem(http.put("/v1/objects/a", content=b"2"), 409, "key-exists")
    assert "if_exists" in said["detail"]
    assert http.put("/v1/objects/a?if_exists=keep", content=b"2").status_code == 204
    assert store.get("a") == b"1"
    assert http.put("/v1/objects/a?if_exists=replace", content=b"2").status_code == 204
    assert store.get("a") == b"2"
    problem(http.put("/v1/objects/a?if_exists=never", content=b"2"), 400, "parameter-invalid")


def test_a_body_of_unknown_length_is_taken_up_to_the_limit(http, store):
    assert http.put("/v1/objects/a", content=iter([b"ab", b"cd" * 5000, b"e"])).status_code == 201
    assert store.get("a") == b"ab" + b"cd" * 5000 + b"e"
    too_much = itertools.repeat(bytes(50_000), 7)
    problem(http.put("/v1/objects/b", content=too_much), 413, "body-too-large")
    problem(http.put("/v1/objects/b", content=bytes(300_001)), 413, "body-too-large")
    assert store.batch_exist(["b"]) == [False]


def test_too_many_bytes_on_their_way_in_are_told_to_come_back(http, store):
    def slow():
        yield bytes(200_000)
        answer = httpx.put(f"{http.base_url}/v1/objects/second", content=bytes(250_000), timeout=20)
        assert answer.headers["retry-after"] == "1"
        problem(answer, 503, "busy")
        yield b"end"

    assert http.put("/v1/objects/first", content=slow()).status_code == 201
    assert http.put("/v1/objects/second", content=bytes(250_000)).status_code == 201


def test_a_store_without_room_says_how_much_there_is(world):
    server = world.stack.enter_context(HttpServer(world.store(lend=MIB)))
    answer = httpx.put(f"{server.url}/v1/objects/a", content=bytes(2 * MIB), timeout=20)
    said = problem(answer, 507, "store-full")
    assert (said["wanted_bytes"], said["capacity_bytes"]) == (2 * MIB, MIB)


def test_limits_of_a_tenant_are_told(world):
    limits = {"": TenantPolicy(quota_bytes=MIB // 2, keys_per_s=0.01)}
    store = world.store(lend=MIB, config=StoreConfig(tenants=limits))
    url = world.stack.enter_context(HttpServer(store)).url
    answers = [httpx.put(f"{url}/v1/objects/{i}", content=bytes(MIB - 1), timeout=20) for i in range(2)]
    problem(answers[0], 507, "quota-exceeded")
    problem(answers[-1], 429, "rate-limited")
    assert int(answers[-1].headers["retry-after"]) >= 1


def test_many_keys_are_looked_for_and_removed_in_one_request(http, store):
    store.put("a", b"1")
    store.put(b"\xff", b"1")
    assert http.post("/v1/exist", json={"keys": ["a", "b"]}).json() == {"exist": [True, False]}
    assert http.post("/v1/exist", json={"keys": ["ff"], "encoding": "hex"}).json() == {"exist": [True]}
    assert http.post("/v1/remove", json={"keys": ["b", "a"]}).json() == {"removed": [False, True]}
    problem(http.post("/v1/exist", json={"keys": ["a"] * 4}), 413, "too-many-keys")
    problem(http.post("/v1/exist", json={"keys": ["zz"], "encoding": "hex"}), 400, "key-invalid")
    problem(http.post("/v1/exist", json={"keys": [""]}), 400, "key-invalid")
    as_json = {"Content-Type": "application/json; charset=utf-8"}
    problem(http.post("/v1/exist", content=b"{", headers=as_json), 400, "body-invalid")
    unsaid = http.post("/v1/exist", content=b'{"keys": ["a"]}', headers={"Content-Type": "text/plain"})
    problem(unsaid, 415, "media-type-unsupported")
    problem(http.post("/v1/exist", json={"key": "a"}), 400, "body-invalid")


def test_a_pinned_value_stays_until_its_pin_ends(http, store):
    http.put("/v1/objects/a%20b", content=bytes(100_000))
    assert http.put("/v1/pins/a%20b").status_code == 204
    assert store.stats().pinned_bytes == 102_400
    assert http.delete("/v1/pins/a%20b").status_code == 204
    assert http.put("/v1/pins/a%20b?soft_s=60").status_code == 204
    assert store.stats().pinned_bytes == 0
    problem(http.put("/v1/pins/b"), 404, "key-not-found")
    problem(http.delete("/v1/pins/b"), 404, "key-not-found")
    problem(http.put("/v1/pins/a%20b?soft_s=soon"), 400, "parameter-invalid")
    problem(http.put("/v1/pins/a%20b?soft_s=-1"), 400, "config-error")


def test_objects_are_listed_and_removed_by_what_their_keys_match(http, store, eventually):
    for key in ("m/1", "m/2", "n/1", b"\xff"):
        store.put(key, bytes(7))
    eventually(lambda: len(http.get("/v1/objects").json()["objects"]) == 4)
    listed = http.get("/v1/objects?prefix=m/").json()
    assert listed["objects"][0] == {"key": "m/1", "key_hex": b"m/1".hex(), "bytes": 7}
    assert http.get("/v1/objects?pattern=1$&limit=1").json()["more"] == 1
    assert {"key": None, "key_hex": "ff", "bytes": 7} in http.get("/v1/objects").json()["objects"]
    assert http.delete("/v1/objects?pattern=^m/").json() == {"removed": 2}
    problem(http.delete("/v1/objects"), 400, "parameter-invalid")
    problem(http.get("/v1/objects?limit=none"), 400, "parameter-invalid")
    problem(http.get("/v1/objects?pattern=("), 400, "config-error")
    assert http.delete("/v1/objects?all=true").json() == {"removed": 2}


def test_a_put_says_how_its_value_is_to_be_kept(http, store):
    assert http.put("/v1/objects/a?hard_pin=true&priority=3&group=g", content=bytes(5000)).status_code == 201
    assert store.stats().pinned_bytes == 8192
    problem(http.put("/v1/objects/b?priority=99", content=b"1"), 400, "config-error")
    problem(http.put("/v1/objects/b?replicas=many", content=b"1"), 400, "parameter-invalid")


def test_a_session_ends(http, store):
    for key, session in (("a", "chat"), ("b", "chat"), ("c", "other")):
        assert http.put(f"/v1/objects/{key}?session={session}", content=b"1").status_code == 201
    assert http.post("/v1/end-session", json={"session": "chat"}).json() == {"values": 2}
    assert http.post("/v1/end-session", json={"session": "unknown"}).json() == {"values": 0}
    assert http.post("/v1/end-session", json={"name": "chat"}).status_code == 400
    assert store.batch_exist(["a", "b", "c"]) == [True, True, True]


def collect(answer, received):
    for part in answer.iter_bytes():
        received += part


def test_a_value_lost_while_it_is_sent_never_arrives_whole(http, store, monkeypatch, content):
    value = content(b"a", 1, 20_000)
    store.put("a", value)

    def lost(reader):
        raise KeyNotFound("lost")

    monkeypatch.setattr(ValueReader, "close", lost)
    with http.stream("GET", "/v1/objects/a") as answer:
        received = bytearray()
        with pytest.raises(httpx.RemoteProtocolError):
            collect(answer, received)
    assert len(received) < len(value)


def test_a_reader_that_goes_away_leaves_no_lease(http, store, eventually):
    store.put("a", bytes(290_000))
    with http.stream("GET", "/v1/objects/a") as answer:
        next(answer.iter_raw())
    eventually(lambda: store.stats().leases == 0)


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl_stores_and_reads_a_file(http, tmp_path, content):
    (tmp_path / "in").write_bytes(content(b"c", 1, 123_456))
    url = f"{http.base_url}/v1/objects/from%20curl"
    curl = ["curl", "--silent", "--show-error", "--fail-with-body", "--max-time", "20"]
    subprocess.run([*curl, "--upload-file", str(tmp_path / "in"), url], check=True)
    subprocess.run([*curl, "--output", str(tmp_path / "out"), url], check=True)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "in").read_bytes()
    part = subprocess.run([*curl, "--range", "5-9", url], check=True, capture_output=True)
    assert part.stdout == content(b"c", 1, 123_456)[5:10]
    missing = subprocess.run([*curl, url + "x"], check=False, capture_output=True, text=True)
    assert missing.returncode == 22
    assert '"status":404' in missing.stdout
