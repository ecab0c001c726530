"""Certificates for tests of servers with TLS. Needs ``cryptography``."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from mooncake_transfer.testing.registry_servers import TlsFiles

__all__ = ["make_tls"]


def make_tls(folder: Path) -> TlsFiles:
    """A new CA, and a certificate of it for 127.0.0.1."""
    folder.mkdir()
    now = datetime.datetime.now(datetime.timezone.utc)

    def build(name: str, issuer: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=name == issuer, path_length=None), critical=True)
        )

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca = build("test ca", "test ca", ca_key).sign(ca_key, hashes.SHA256())
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    cert = build("test", "test ca", key).add_extension(address, critical=False).sign(ca_key, hashes.SHA256())
    files = TlsFiles(*(str(folder / name) for name in ("ca.pem", "cert.pem", "key.pem")))
    pem = serialization.Encoding.PEM
    Path(files.ca).write_bytes(ca.public_bytes(pem))
    Path(files.cert).write_bytes(cert.public_bytes(pem))
    Path(files.key).write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files
