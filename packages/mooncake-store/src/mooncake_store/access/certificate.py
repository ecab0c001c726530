"""Names in certificates."""

from __future__ import annotations

import importlib

from mooncake_store._errors import ConfigError

__all__ = ["names_of", "require_reader"]


def names_of(certificate: bytes) -> list[str]:
    """The names in a DER certificate that was verified: URIs, then ``dns:NAME``, then ``CN=NAME``."""
    x509 = importlib.import_module("cryptography.x509")
    read = x509.load_der_x509_certificate(certificate)
    names: list[str] = []
    try:
        alternative = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        pass
    else:
        names += alternative.get_values_for_type(x509.UniformResourceIdentifier)
        names += [f"dns:{name}" for name in alternative.get_values_for_type(x509.DNSName)]
    common = read.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return names + [f"CN={attribute.value}" for attribute in common]


def require_reader() -> None:
    """See that certificates can be read. Raises ConfigError."""
    try:
        importlib.import_module("cryptography.x509")
    except ImportError as error:
        raise ConfigError(
            f'rules for certificates need cryptography ({error}); pip install "mooncake-store[access]"'
        ) from None
