"""The channel over TLS 1.3; the other side is Python's ssl where another implementation says more."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import trustme

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer._core import Channel
from mooncake_transfer.errors import ConfigError, NoRoute, PeerUntrusted
from mooncake_transfer.tls import TlsConfig

DEADLINE_S = 10.0
MIB = 1 << 20

OpenChannel = Callable[..., Channel]


class Identity(NamedTuple):
    ca: str
    certificate: str
    key: str

    def tls(self, *, verify_host: bool = True) -> tuple[str, str, str, bool]:
        return (*self, verify_host)


class Authority:
    """Certificates of one CA, as files."""

    def __init__(self, folder: Path):
        self._ca, self._folder = trustme.CA(), folder
        folder.mkdir()
        self.ca_file = str(folder / "ca.pem")
        self._ca.cert_pem.write_to_path(self.ca_file)

    def issue(self, *hosts: str) -> Identity:
        issued = self._ca.issue_cert(*hosts)
        name = hosts[0].replace(":", "-")
        key, certificate = self._folder / f"{name}.key", self._folder / f"{name}.pem"
        issued.private_key_pem.write_to_path(str(key))
        for i, blob in enumerate(issued.cert_chain_pems):
            blob.write_to_path(str(certificate), append=i > 0)
        return Identity(self.ca_file, str(certificate), str(key))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def local(authority: Authority) -> Identity:
    return authority.issue("127.0.0.1", "::1", "localhost")


@pytest.mark.parametrize("size", [0, 1, 16384, 65536, 5_000_000])
def test_a_call_of_any_size_is_answered_over_tls(
    open_channel: OpenChannel, answering: Callable[[Channel], None], local: Identity, size: int
) -> None:
    asker, answerer = open_channel(tls=local.tls()), open_channel(b"there", tls=local.tls())
    answering(answerer)
    connection, hello = asker.connect("127.0.0.1", answerer.port, DEADLINE_S)
    assert hello == b"there"
    body = bytes(i % 251 for i in range(size))
    assert asker.call(connection, "reverse", body, DEADLINE_S) == (False, body[::-1])


def test_a_certificate_for_a_name_and_for_an_ipv6_address_is_accepted(
    open_channel: OpenChannel, local: Identity
) -> None:
    asker = open_channel(tls=local.tls())
    for host in ("localhost", "::1", f"::1%{socket.if_nametoindex('lo')}"):
        there = open_channel(host=host, tls=local.tls())
        assert asker.connect(host, there.port, DEADLINE_S)[1] == b"channel"


def test_notifications_and_calls_of_many_threads_share_one_encrypted_connection(
    open_channel: OpenChannel, answering: Callable[[Channel], None], local: Identity
) -> None:
    asker, answerer = open_channel(tls=local.tls()), open_channel(tls=local.tls())
    answering(answerer)
    connection, _ = asker.connect("127.0.0.1", answerer.port, DEADLINE_S)
    wrong: list[bytes] = []

    def work(seed: int) -> None:
        for i in range(50):
            body = bytes([seed, i]) * (1 + i * 400)
            asker.notify(connection, "note", body, DEADLINE_S)
            answer = asker.call(connection, "reverse", body, DEADLINE_S)[1]
            if answer != body[::-1]:
                wrong.append(answer)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    kinds = [answerer.next_event(DEADLINE_S) for _ in range(1 + 4 * 50)]
    assert [event[0] for event in kinds if event] == ["hello"] + ["notify"] * 200


def test_a_plain_engine_learns_that_the_other_uses_tls(open_channel: OpenChannel, local: Identity) -> None:
    plain, encrypted = open_channel(), open_channel(tls=local.tls())
    with pytest.raises(PeerUntrusted, match=rf"127.0.0.1:{encrypted.port}.*does not use TLS and this engine"):
        plain.connect("127.0.0.1", encrypted.port, DEADLINE_S)
    event = encrypted.next_event(DEADLINE_S)
    assert event is not None
    assert event[0] == "refused"
    assert b"127.0.0.1" in event[4]


def test_a_tls_engine_learns_that_the_other_is_plain(open_channel: OpenChannel, local: Identity) -> None:
    plain, encrypted = open_channel(), open_channel(tls=local.tls())
    with pytest.raises(PeerUntrusted, match=rf"127.0.0.1:{plain.port}.*set `tls` for both"):
        encrypted.connect("127.0.0.1", plain.port, DEADLINE_S)
    event = plain.next_event(DEADLINE_S)
    assert event is not None
    assert (event[0], b"uses TLS" in event[4]) == ("refused", True)


def test_a_peer_of_another_ca_is_refused_at_both_ends(
    open_channel: OpenChannel, local: Identity, tmp_path: Path
) -> None:
    foreign = Authority(tmp_path / "foreign").issue("127.0.0.1")
    ours = open_channel(tls=local.tls())
    with pytest.raises(PeerUntrusted, match="certificate verify failed"):
        open_channel(tls=foreign.tls()).connect("127.0.0.1", ours.port, DEADLINE_S)
    impostor = Identity(local.ca, foreign.certificate, foreign.key)
    with pytest.raises(PeerUntrusted, match="alert"):
        open_channel(tls=impostor.tls()).connect("127.0.0.1", ours.port, DEADLINE_S)
    events = [ours.next_event(DEADLINE_S) for _ in range(2)]
    assert [event[0] for event in events if event] == ["refused", "refused"]


def test_a_certificate_for_another_host_is_refused_unless_hosts_do_not_matter(
    open_channel: OpenChannel, authority: Authority, local: Identity
) -> None:
    elsewhere = open_channel(tls=authority.issue("elsewhere.test").tls())
    with pytest.raises(PeerUntrusted, match="mismatch"):
        open_channel(tls=local.tls()).connect("127.0.0.1", elsewhere.port, DEADLINE_S)
    lenient = open_channel(tls=local.tls(verify_host=False))
    lenient.connect("127.0.0.1", elsewhere.port, DEADLINE_S)


def test_a_client_without_a_certificate_and_one_with_tls_1_2_get_nowhere(
    open_channel: OpenChannel, local: Identity
) -> None:
    channel = open_channel(tls=local.tls())
    with_certificate = ssl.create_default_context(cafile=local.ca)
    with_certificate.load_cert_chain(local.certificate, local.key)
    with_certificate.maximum_version = ssl.TLSVersion.TLSv1_2
    for context in (ssl.create_default_context(cafile=local.ca), with_certificate):
        with (
            socket.create_connection(("127.0.0.1", channel.port), DEADLINE_S) as raw,
            pytest.raises((ssl.SSLError, ConnectionError)),
            context.wrap_socket(raw, server_hostname="127.0.0.1") as client,
        ):
            client.recv(1)


def test_another_implementation_of_tls_is_greeted(open_channel: OpenChannel, local: Identity) -> None:
    channel = open_channel(b"there", tls=local.tls())
    context = ssl.create_default_context(cafile=local.ca)
    context.load_cert_chain(local.certificate, local.key)
    with (
        socket.create_connection(("127.0.0.1", channel.port), DEADLINE_S) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as client,
    ):
        assert client.version() == "TLSv1.3"
        client.sendall(b"\0\0\0\0\x01\x01\0\0" + bytes(8))
        assert client.recv(64)[16:] == b"there"


def test_a_peer_that_stops_in_the_middle_of_the_handshake_is_dropped_and_a_client_gives_up_in_time(
    open_channel: OpenChannel, local: Identity
) -> None:
    channel = open_channel(tls=local.tls(), greeting_s=0.3)
    with socket.create_connection(("127.0.0.1", channel.port), DEADLINE_S) as half:
        half.sendall(b"\x16\x03\x01\x02\x00")
        assert half.recv(64) == b""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(Exception, match=r"TLS handshake did not end in time"),
    ):
        channel.connect("127.0.0.1", silent.getsockname()[1], 0.3)


def config_with(tls: TlsConfig) -> TransferConfig:
    return TransferConfig(tls=tls, drivers=("tcp",))


def test_engines_with_tls_move_bytes_and_one_without_is_refused(local: Identity) -> None:
    tls = TlsConfig(ca_file=local.ca, certificate_file=local.certificate, key_file=local.key)
    with TransferEngine(config_with(tls)) as here, TransferEngine(config_with(tls)) as there:
        there.serve("echo", lambda payload, caller: payload)
        assert here.connect(there.address).call("echo", b"hello") == b"hello"
        target, source = there.register(bytearray(64)), here.register(bytearray(b"x" * 64))
        here.write(source, here.import_region(target.descriptor()), [(0, 0, 64)]).wait()
        with TransferEngine(TransferConfig(drivers=("tcp",))) as plain, pytest.raises(PeerUntrusted):
            plain.connect(there.address)


def test_with_tls_for_data_the_bytes_of_regions_are_encrypted_too_and_a_plain_reader_gets_none(
    local: Identity,
) -> None:
    def config(identity: Identity, *, data: bool) -> TransferConfig:
        ca, certificate, key = identity
        return config_with(TlsConfig(ca_file=ca, certificate_file=certificate, key_file=key, data=data))

    with TransferEngine(config(local, data=True)) as here, TransferEngine(config(local, data=True)) as there:
        target, source = there.register(bytearray(MIB)), here.register(bytearray(b"x" * MIB))
        here.write(source, here.import_region(target.descriptor()), [(0, 0, MIB)]).wait(DEADLINE_S)
        assert bytes(target.view()[-4:]) == b"xxxx"
        refused = pytest.raises(NoRoute, match=r"set TlsConfig\.data for both or for neither")
        with TransferEngine(config(local, data=False)) as half, refused:
            half.import_region(target.descriptor())


@pytest.mark.parametrize("field", ["ca_file", "certificate_file", "key_file"])
def test_a_file_that_is_missing_or_holds_something_else_is_named_at_the_start(
    local: Identity, tmp_path: Path, field: str
) -> None:
    files = {"ca_file": local.ca, "certificate_file": local.certificate, "key_file": local.key}
    with pytest.raises(ConfigError, match=rf"tls\.{field} cannot be read.*absent"):
        TransferEngine(config_with(TlsConfig(**{**files, field: str(tmp_path / "absent")})))
    junk = tmp_path / "junk.pem"
    junk.write_text("no PEM at all\n")
    with pytest.raises(ConfigError, match=r"junk\.pem"):
        TransferEngine(config_with(TlsConfig(**{**files, field: str(junk)})))
    with pytest.raises(ConfigError, match=f"{field} is empty"):
        TlsConfig(**{**files, field: ""})


def test_a_key_that_does_not_belong_to_the_certificate_is_named_at_the_start(
    authority: Authority, local: Identity
) -> None:
    other = authority.issue("other.test")
    tls = TlsConfig(ca_file=local.ca, certificate_file=local.certificate, key_file=other.key)
    with pytest.raises(ConfigError, match=r"other\.test\.key"):
        TransferEngine(config_with(tls))


def test_a_handler_is_told_which_certificate_its_caller_has(authority: Authority, local: Identity) -> None:
    tls = TlsConfig(ca_file=local.ca, certificate_file=local.certificate, key_file=local.key)
    other = authority.issue("other.test.invalid", "127.0.0.1")
    other_tls = TlsConfig(ca_file=other.ca, certificate_file=other.certificate, key_file=other.key)
    certificates: list[bytes] = []
    with (
        TransferEngine(TransferConfig(tls=tls)) as server,
        TransferEngine(TransferConfig(tls=other_tls)) as client,
    ):
        server.serve("who", lambda payload, caller: certificates.append(caller.certificate))
        client.connect(server.address).call("who", b"")
    shown = ssl.PEM_cert_to_DER_cert(Path(other.certificate).read_text())
    assert certificates == [shown]


def test_without_tls_a_caller_has_no_certificate() -> None:
    certificates: list[bytes] = []
    with TransferEngine() as server, TransferEngine() as client:
        server.serve("who", lambda payload, caller: certificates.append(caller.certificate))
        client.connect(server.address).call("who", b"")
    assert certificates == [b""]
