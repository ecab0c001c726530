"""Data connections under TLS 1.3: both sides must show a certificate of the authority."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme

from mooncake_driver_tcp.testing import Address, Client, Frame, Op
from mooncake_transfer import TransferEngine
from mooncake_transfer.errors import DriverUnavailable, NoRoute, PeerUnreachable
from mooncake_transfer.testing import pattern

MIB = 1 << 20
DEADLINE_S = 20.0

Start = Callable[..., TransferEngine]
AddressOf = Callable[[TransferEngine], Address]
Files = dict[str, str]


def issue(folder: Path) -> Files:
    """Make an authority and one certificate of it, and return the options that name them."""
    authority, folder = trustme.CA(), folder / "pem"
    folder.mkdir(parents=True)
    files = {name: str(folder / name) for name in ("tls_ca", "tls_certificate", "tls_key")}
    authority.cert_pem.write_to_path(files["tls_ca"])
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(files["tls_key"])
    issued.cert_chain_pems[0].write_to_path(files["tls_certificate"])
    return files


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return issue(tmp_path / "ours")


def move(reader: TransferEngine, owner: TransferEngine, nbytes: int) -> None:
    source, place = owner.allocate(nbytes), reader.allocate(nbytes)
    remote = reader.import_region(source.descriptor())
    source.view()[:] = pattern(1, nbytes).tobytes()
    reader.read(place, remote, [[0, 0, nbytes]]).wait(DEADLINE_S)
    assert place.view() == source.view()
    place.view()[:] = pattern(2, nbytes).tobytes()
    reader.write(place, remote, [[0, 0, nbytes]]).wait(DEADLINE_S)
    assert place.view() == source.view()


@pytest.mark.parametrize("nbytes", [1, 4096, 70_000, 5 * MIB + 1])
def test_bytes_move_both_ways(start: Start, files: Files, nbytes: int) -> None:
    move(start(**files), start(**files), nbytes)


def test_many_small_operations_move(start: Start, files: Files) -> None:
    owner, writer = start(**files), start(**files)
    count, size = 3000, 512
    target, source = owner.allocate(2 * count * size), writer.allocate(count * size)
    source.view()[:] = pattern(3, count * size).tobytes()
    blocks = [[i * size, 2 * i * size, size] for i in range(count)]
    writer.write(source, writer.import_region(target.descriptor()), blocks).wait(DEADLINE_S)
    for i in range(0, count, 97):
        assert target.view()[2 * i * size :][:size] == source.view()[i * size :][:size]


def test_a_certificate_of_another_authority_is_turned_away(
    start: Start, files: Files, tmp_path: Path
) -> None:
    owner, stranger = start(**files), start(**issue(tmp_path / "theirs"))
    remote = stranger.import_region(owner.allocate(4096).descriptor())
    with pytest.raises(PeerUnreachable, match="certificate"):
        stranger.read(stranger.allocate(4096), remote, [[0, 0, 4096]]).wait(DEADLINE_S)


@pytest.mark.parametrize(("secure", "where"), [("initiator", "this end only"), ("target", "the peer only")])
def test_plain_and_encrypted_do_not_meet_and_say_why(
    start: Start, files: Files, secure: str, where: str
) -> None:
    owner = start(**(files if secure == "target" else {}))
    reader = start(**(files if secure == "initiator" else {}))
    said = f"tcp is encrypted at {where}; set TlsConfig.data for both or for neither"
    with pytest.raises(NoRoute, match=said):
        reader.import_region(owner.allocate(4096).descriptor())


def test_an_encrypted_target_drops_who_speaks_in_plain(
    start: Start, files: Files, address_of: AddressOf
) -> None:
    address = address_of(start(**files))
    assert address.encrypted
    with Client(address.port) as client:
        client.send(Frame(Op.HELLO, key=address.nonce))
        while client.receive(1):  # its alert
            pass


def test_an_initiator_without_a_certificate_is_not_served(
    start: Start, files: Files, address_of: AddressOf
) -> None:
    address = address_of(start(**files))
    context = ssl.create_default_context(cafile=files["tls_ca"])
    plain = socket.create_connection(("127.0.0.1", address.port), timeout=DEADLINE_S)
    with context.wrap_socket(plain, server_hostname="127.0.0.1") as client:
        # TLS 1.3 lets the client finish first: the refusal comes with the first bytes.
        try:
            client.sendall(Frame(Op.HELLO, key=address.nonce).packed())
            answer = client.recv(64)
        except (ssl.SSLError, ConnectionError):
            answer = b""
        assert answer == b""


def test_another_implementation_of_tls_is_served(start: Start, files: Files, address_of: AddressOf) -> None:
    address = address_of(start(**files))
    context = ssl.create_default_context(cafile=files["tls_ca"])
    context.load_cert_chain(files["tls_certificate"], files["tls_key"])
    with Client(address.port) as client:
        client.socket = context.wrap_socket(client.socket, server_hostname="127.0.0.1")
        assert client.greet(address.nonce) == Frame(Op.WELCOME)
        assert client.socket.version() == "TLSv1.3"


def test_a_file_that_is_not_there_is_named(start: Start, files: Files) -> None:
    with pytest.raises(DriverUnavailable, match=r"absent\.pem"):
        start(**{**files, "tls_key": "/absent.pem"})
