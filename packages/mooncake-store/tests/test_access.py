"""Who may act for which tenant: by certificate over mutual TLS, or by token; the master decides."""

import datetime
import hashlib
import ipaddress
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from typer.testing import CliRunner

from mooncake_store import Store, StoreConfig, protocol
from mooncake_store.access import AccessRules, Admission, Rule, load_rules
from mooncake_store.access.certificate import names_of
from mooncake_store.access.gate import FOR_ADMINS, FOR_TENANTS
from mooncake_store.errors import ConfigError, KeyNotFound, MasterUnreachable, NotAuthorised
from mooncake_store.keys import object_digests
from mooncake_store.master.state import MasterState
from mooncake_store.protocol import tiers
from mooncake_store.protocol.codec import GROUPS
from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.cli import build_app
from mooncake_transfer.errors import PeerUntrusted
from mooncake_transfer.tls import TlsConfig

MIB = 1 << 20
TOKEN = "a long secret"
TOKEN_HASH = hashlib.sha256(TOKEN.encode()).hexdigest()
RULES = f"""
[[allow]]
certificate = "spiffe://example.org/tenant/{{tenant}}"

[[allow]]
certificate = "spiffe://example.org/node/*"
lend = true

[[allow]]
certificate = "CN=operator"
tenants = ["*"]
admin = true

[[allow]]
token_sha256 = "{TOKEN_HASH}"
tenants = ["blue", "green"]
"""


class Authority:
    """A CA whose certificates have URIs, as SPIFFE's have; they are good for engines on 127.0.0.1."""

    def __init__(self, folder):
        self.folder = folder
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test CA")])
        self.ca = self._sign(self.name, self.key.public_key(), x509.BasicConstraints(True, None))
        (folder / "ca.pem").write_bytes(self.ca.public_bytes(serialization.Encoding.PEM))

    def _sign(self, subject, public_key, *extensions):
        now = datetime.datetime.now(datetime.timezone.utc)
        building = x509.CertificateBuilder(self.name, subject, public_key, x509.random_serial_number())
        building = building.not_valid_before(now - datetime.timedelta(days=1))
        building = building.not_valid_after(now + datetime.timedelta(days=1))
        for extension in extensions:
            building = building.add_extension(
                extension, critical=isinstance(extension, x509.BasicConstraints)
            )
        return building.sign(self.key, hashes.SHA256())

    def issue(self, common_name, *uris):
        """Settings of an engine with a certificate of these names."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
            x509.DNSName(f"{common_name}.test.invalid"),
        ]
        names += map(x509.UniformResourceIdentifier, uris)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        certificate = self._sign(subject, key.public_key(), x509.SubjectAlternativeName(names))
        place = self.folder / f"{common_name}-{len(list(self.folder.iterdir()))}"
        place.with_suffix(".pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        plain = key.private_bytes(encoding, form, serialization.NoEncryption())
        place.with_suffix(".key").write_bytes(plain)
        return TransferConfig(
            tls=TlsConfig(
                ca_file=str(self.folder / "ca.pem"),
                certificate_file=str(place.with_suffix(".pem")),
                key_file=str(place.with_suffix(".key")),
            )
        )


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def files(tmp_path):
    (tmp_path / "access.toml").write_text(RULES)
    (tmp_path / "token").write_text(TOKEN + "\n")
    (tmp_path / "wrong").write_text("guess")
    return tmp_path


class Cluster:
    """A master with rules, a node that lends, and clients that show who they are."""

    def __init__(self, world, authority, files, fast):
        self.world, self.authority, self.files, self.fast = world, authority, files, fast
        self.engine = self.engine_of("master")
        config = self.config(access_file=str(files / "access.toml"))
        self.master = world.store(self.engine, config=config).master
        self.node = world.store(
            self.engine_of("node", "spiffe://example.org/node/1"), self.engine.address, lend=4 * MIB
        )

    def config(self, **settings):
        values = {name: getattr(self.fast, name) for name in self.fast.__struct_fields__}
        return StoreConfig(**{**values, **settings})

    def engine_of(self, *names):
        return self.world.stack.enter_context(TransferEngine(self.authority.issue(*names)))

    def client(self, *names, lend=0, **settings):
        engine = self.engine_of(*names)
        return self.world.store(engine, self.engine.address, lend=lend, config=self.config(**settings))

    def tenant(self, name):
        return self.client("worker", f"spiffe://example.org/tenant/{name}", tenant=name)


@pytest.fixture
def cluster(world, authority, files, fast):
    return Cluster(world, authority, files, fast)


def test_a_tenant_named_by_its_certificate_has_its_own_objects(cluster):
    red, blue = cluster.tenant("red"), cluster.tenant("blue")
    red.put("k", b"red")
    blue.put("k", b"blue")
    assert (red.get("k"), blue.get("k")) == (b"red", b"blue")
    red.remove("k")
    assert blue.get("k") == b"blue"


def test_nobody_acts_for_a_tenant_that_the_certificate_does_not_name(cluster):
    with pytest.raises(NotAuthorised, match="may not act for tenant 'blue'; it may for \\['red'\\]"):
        cluster.client("worker", "spiffe://example.org/tenant/red", tenant="blue")
    with pytest.raises(NotAuthorised, match=r"spiffe://elsewhere\.org/tenant/red"):
        cluster.client("worker", "spiffe://elsewhere.org/tenant/red", tenant="red")
    with pytest.raises(NotAuthorised, match="may not lend memory"):
        cluster.client("worker", "spiffe://example.org/tenant/red", tenant="red", lend=MIB)
    with pytest.raises(NotAuthorised):
        cluster.client("stranger")


def test_a_token_stands_for_its_tenants(cluster, files):
    green = cluster.client("stranger", tenant="green", token_file=str(files / "token"))
    green.put("k", b"1")
    assert green.get("k") == b"1"
    with pytest.raises(NotAuthorised, match="'red'"):
        cluster.client("stranger", tenant="red", token_file=str(files / "token"))
    with pytest.raises(NotAuthorised):
        cluster.client("stranger", tenant="green", token_file=str(files / "wrong"))


def test_what_concerns_all_tenants_is_for_admins(cluster):
    red = cluster.tenant("red")
    red.put("k", b"1")
    with pytest.raises(NotAuthorised, match="is for admins"):
        red.report()
    operator = cluster.client("operator", tenant="red")
    assert operator.report().stats.objects == 1
    assert operator.get("k") == b"1"


def test_segments_are_drained_by_admins_and_copies_asked_for_of_own_values_only(cluster):
    red, blue = cluster.tenant("red"), cluster.tenant("blue")
    blue.put("k", b"blue")
    (segment,) = blue.replicas("k")
    with pytest.raises(NotAuthorised, match="by admins"):
        red.drain(segment)
    operator = cluster.client("operator", tenant="red")
    assert operator.stop_draining(segment).segment == segment
    red.config = cluster.config(tenant="blue")
    assert red.batch_replicas(["k"]) == [None]
    assert [outcome.name for outcome in red.replicate(["k"], 2)] == ["GONE"]


def test_a_put_under_digests_of_another_tenant_is_refused(cluster):
    red, blue = cluster.tenant("red"), cluster.tenant("blue")
    blue.put("k", b"blue")
    red._quick = None  # which makes digests as it was opened to
    red.config = cluster.config(tenant="blue")  # the client's word for whose keys they are
    with pytest.raises(NotAuthorised, match="are not those of its keys of tenant 'red'"):
        red.put("k", b"evil", if_exists="replace")
    assert blue.get("k") == b"blue"


def test_objects_of_another_tenant_are_not_there_for_who_names_their_digests(cluster):
    red, blue = cluster.tenant("red"), cluster.tenant("blue")
    blue.put("k", b"blue")
    red._quick, red.config = None, cluster.config(tenant="blue")
    assert red.batch_exist(["k"]) == [False]
    assert red.batch_remove(["k"]) == [False]
    with pytest.raises(KeyNotFound):
        red.get("k")
    for ask in (protocol.Pin(digests=b"", soft_pin_s=None), protocol.Unpin(digests=b"")):
        ask.digests = object_digests("blue", [b"k"])
        assert red._member.ask(ask, protocol.Found).found == b"\0"
    assert blue.get("k") == b"blue"
    operator = cluster.client("operator", tenant="blue")
    assert operator.get("k") == b"blue"


def test_objects_in_tiers_are_their_tenants_too():
    state = MasterState(7, StoreConfig())
    state.handle(protocol.Mount(client=1, nbytes=0, descriptor=b""), 1, "127.0.0.1:1", 0.0)
    mount = tiers.MountTiers(epoch=7, client=1, address="127.0.0.1:1", tiers=[("disk", False)], touches=1)
    mounted = state.handle(mount, 1, "", 0.0)
    digests = object_digests("blue", [b"known", b"unknown"])
    numbers = np.array([[1, 1, 5]], dtype="<u8").tobytes()
    for digest, tenants in ((digests[:16], ["blue"]), (digests[16:], [])):
        records = tiers.AdoptRecords(tier=mounted.tiers[0], digests=digest, numbers=numbers, tenants=tenants)
        records.epoch, records.client = 7, 1
        assert state.handle(records, 1, "", 0.0).taken == b"\1"
    (tier,) = state.report(0, 0.0).tiers
    assert (tier.tier, tier.owners, tier.records, tier.value_bytes) == ("disk", ["127.0.0.1:1"], 2, 10)
    assert state.own(digests, "red") == bytes(32)
    assert state.own(digests, "blue") == digests[:16] + bytes(16)
    state.handle(protocol.Remove(epoch=7, client=1, digests=digests[:16]), 1, "", 0.0)
    lost = tiers.RecordsLost(epoch=7, client=1, tier=mounted.tiers[0], digests=digests[16:], numbers=numbers)
    state.handle(lost, 1, "", 0.0)
    (tier,) = state.report(0, 0.0).tiers
    assert (tier.records, tier.value_bytes) == (0, 0)


def test_a_node_may_handle_what_lies_in_it_whose_ever_it_is(cluster):
    red = cluster.tenant("red")
    red.put("k", b"red")
    request = protocol.Exist(digests=object_digests("red", [b"k"]))
    assert cluster.node._member.ask(request, protocol.Found).found == b"\1"


def test_what_owners_tell_the_master_is_for_owners(cluster):
    adopt = protocol.Adopt(frames=b"", last=True)
    with pytest.raises(NotAuthorised, match="Adopt is for who lends memory"):
        cluster.tenant("red")._member.ask(adopt, protocol.Adopted)


def test_who_may_ask_what_is_said_of_requests_that_there_are():
    there = {request.__name__ for group in GROUPS for request in group.REQUESTS}
    assert there >= FOR_TENANTS | FOR_ADMINS


def test_who_has_lost_its_connection_has_lost_what_it_may(cluster, eventually):
    gate = cluster.master._gate
    red = cluster.tenant("red")
    joined = len(gate._members)
    red.close()
    red.engine.close()
    eventually(lambda: len(gate._members) == joined - 1)


def test_an_engine_without_tls_or_of_another_ca_reaches_nobody(world, cluster, tmp_path, fast):
    with pytest.raises(PeerUntrusted):
        Store(world.engine(), cluster.engine.address, config=fast)
    (tmp_path / "other").mkdir()
    other = TransferEngine(Authority(tmp_path / "other").issue("operator"))
    with other, pytest.raises((PeerUntrusted, MasterUnreachable)):
        Store(other, cluster.engine.address, config=fast)


def test_a_process_trusts_its_own_master(cluster):
    local = cluster.world.store(cluster.engine, cluster.master)
    local.put("k", b"1")
    assert local.report().stats.objects == 1
    with pytest.raises(KeyNotFound):
        cluster.tenant("red").get("k")


def test_without_rules_everybody_may_everything_and_a_token_does_no_harm(world, files, fast):
    engine = world.engine()
    world.store(engine, lend=MIB)
    values = {name: getattr(fast, name) for name in fast.__struct_fields__}
    config = StoreConfig(**{**values, "tenant": "any", "token_file": str(files / "token")})
    other = world.store(world.engine(), engine.address, config=config)
    other.put("k", b"1")
    assert other.report().stats.objects == 1


def test_names_are_read_from_certificates(authority):
    tls = authority.issue("cn", "spiffe://example.org/a", "https://x.test/").tls
    certificate = x509.load_pem_x509_certificate(Path(tls.certificate_file).read_bytes())
    names = names_of(certificate.public_bytes(serialization.Encoding.DER))
    assert names == ["spiffe://example.org/a", "https://x.test/", "dns:cn.test.invalid", "CN=cn"]


@pytest.mark.parametrize(
    ("pattern", "name", "tenants"),
    [
        ("spiffe://a/tenant/{tenant}", "spiffe://a/tenant/red", {"red"}),
        ("spiffe://a/tenant/{tenant}", "spiffe://a/tenant/red/more", None),
        ("spiffe://a/tenant/{tenant}", "spiffe://b/tenant/red", None),
        ("spiffe://a/*/tenant/{tenant}", "spiffe://a/eu/tenant/red", {"red"}),
        ("spiffe://a.b/tenant/{tenant}", "spiffe://aXb/tenant/red", None),
        ("CN={tenant}", "CN=red", {"red"}),
        ("CN={tenant}", "dns:red", None),
        ("CN={tenant}", "CN=", None),
    ],
)
def test_a_pattern_is_for_a_whole_name(pattern, name, tenants):
    found = Rule(certificate=pattern).tenants_of([name])
    assert found == (None if tenants is None else frozenset(tenants))


def test_rules_add_up():
    rules = AccessRules(
        (
            Rule(certificate="CN={tenant}"),
            Rule(certificate="dns:*.test", tenants=("shared",)),
            Rule(certificate="dns:node.test", lend=True),
            Rule(token_sha256=TOKEN_HASH, admin=True),
        )
    )
    assert rules.admission(["CN=red", "dns:node.test"], "") == Admission(
        frozenset({"red", "shared"}), True, False
    )
    assert rules.admission([], TOKEN) == Admission(frozenset(), False, True)
    assert rules.admission([], "") == rules.admission([], TOKEN + "x") == Admission()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[allow]]\ntenants = ['a']", "needs certificate or token_sha256"),
        ("[[allow]]\ncertificate = 'CN=a'", "allows nothing"),
        ("[[allow]]\ntoken_sha256 = 'abc'\ntenants = ['a']", "no SHA-256"),
        ("[[allow]]\ncertificates = 'CN=a'", "certificates"),
        ("allow = 3", "cannot be used"),
        ("[", "cannot be used"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path, text, said):
    (tmp_path / "rules").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_rules(tmp_path / "rules")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_rules(tmp_path / "none")


def test_rules_for_certificates_need_tls(world, files):
    with pytest.raises(ConfigError, match=r"no TransferConfig\.tls"):
        Store(world.engine(), config=StoreConfig(access_file=str(files / "access.toml")))


def test_a_request_of_who_is_no_member_is_told_so(cluster):
    peer = cluster.engine_of("worker", "spiffe://example.org/tenant/red").connect(cluster.engine.address)
    request = protocol.GetReport(epoch=cluster.master.epoch, client=cluster.node._member.client)
    reply = protocol.decode_reply(peer.call(protocol.METHOD, protocol.encode(request)))
    assert isinstance(reply, protocol.Stale)


def test_the_commands_take_certificates_from_the_environment(authority, files, monkeypatch):
    """A master, a put and a get as a person would type them."""

    def environment(config):
        named = {"CA_FILE": config.tls.ca_file, "KEY_FILE": config.tls.key_file}
        named["CERTIFICATE_FILE"] = config.tls.certificate_file
        for name, value in named.items():
            monkeypatch.setenv(f"MOONCAKE_TRANSFER_TLS__{name}", value)

    environment(authority.issue("master"))
    ready, ready_end = os.pipe()
    command = [sys.executable, "-m", "mooncake_transfer.cli", "store", "master", "--ready-fd", str(ready_end)]
    command += ["--access-file", str(files / "access.toml")]
    process = subprocess.Popen(command, pass_fds=(ready_end,), stderr=subprocess.DEVNULL)
    os.close(ready_end)
    try:
        with os.fdopen(ready) as pipe:
            address = json.loads(pipe.read())["address"]
        node = authority.issue("node", "spiffe://example.org/node/1")
        with TransferEngine(node) as engine, Store(engine, address, lend_bytes=MIB):
            environment(authority.issue("worker", "spiffe://example.org/tenant/red"))
            monkeypatch.setenv("MOONCAKE_STORE_MASTER", address)
            runner, app = CliRunner(), build_app()
            put = ["store", "put", "-", "--key", "k", "--tenant"]
            assert runner.invoke(app, [*put, "red"], input=b"1").exit_code == 0
            refused = runner.invoke(app, [*put, "blue"], input=b"1")
            assert refused.exit_code == 4
            assert "may not act for tenant 'blue'" in refused.stderr
            assert runner.invoke(app, ["store", "get", "k", "--tenant", "red"]).stdout_bytes == b"1"
    finally:
        process.terminate()
        assert process.wait(60) == 0
