"""What an access file says.

TOML, one table for each kind of client::

    [[allow]]                                             # a tenant's workload, named by its certificate
    certificate = "spiffe://example.org/tenant/{tenant}"

    [[allow]]                                             # lends memory, and so holds bytes of all tenants
    certificate = "spiffe://example.org/node/*"
    lend = true

    [[allow]]                                             # sha256 of a token, in hexadecimal
    token_sha256 = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"
    tenants = ["search", "chat"]

    [[allow]]
    certificate = "CN=operator"
    tenants = ["*"]
    admin = true
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from mooncake_store._errors import ConfigError

__all__ = ["AccessRules", "Admission", "Rule", "load_rules"]

ANY = "*"
TOKEN_HASH = re.compile(r"[0-9a-f]{64}$")


class Admission(NamedTuple):
    """What one client may.

    Attributes:
        tenants: for whom it may act; ``"*"`` among them: for everybody.
        lend: it may lend memory. It is trusted with what lies there, whose ever it is.
        admin: it may see and do what concerns all tenants.
    """

    tenants: frozenset[str] = frozenset()
    lend: bool = False
    admin: bool = False

    def may_act_for(self, tenant: str) -> bool:
        """Whether it may name this tenant's keys."""
        return tenant in self.tenants or ANY in self.tenants

    @property
    def trusted(self) -> bool:
        """It sees bytes of all tenants anyway."""
        return self.lend or self.admin


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of client, and what it may. Raises ConfigError for a rule that cannot work.

    Attributes:
        certificate: a name in its certificate: a URI (``spiffe://…``), a DNS name as ``dns:NAME``, or the
            common name as ``CN=NAME``. ``*`` is any text without a slash; ``{tenant}`` likewise, and is the
            tenant it may act for.
        token_sha256: SHA-256 of its token, in hexadecimal: ``printf %s TOKEN | sha256sum``.
        tenants: for whom it may act; ``"*"`` is everybody. Empty: the one that ``{tenant}`` stands for.
        lend: see Admission.
        admin: see Admission.
    """

    certificate: str = ""
    token_sha256: str = ""
    tenants: tuple[str, ...] = ()
    lend: bool = False
    admin: bool = False

    def __post_init__(self) -> None:
        if bool(self.certificate) == bool(self.token_sha256):
            raise ConfigError("an access rule needs certificate or token_sha256, and not both")
        if self.token_sha256 and not TOKEN_HASH.match(self.token_sha256):
            raise ConfigError(
                f"token_sha256 {self.token_sha256!r:.80} is no SHA-256 of 64 lower-case hexadecimal digits; "
                f"use: printf %s TOKEN | sha256sum"
            )
        if not (self.tenants or self.lend or self.admin or "{tenant}" in self.certificate):
            raise ConfigError(
                f"the access rule for {self.certificate or 'a token'} allows nothing; give tenants, lend or "
                f"admin, or have {{tenant}} in certificate"
            )

    def tenants_of(self, names: Sequence[str]) -> frozenset[str] | None:
        """For whom a client whose certificate has these names may act; None when the rule is not for it."""
        pattern = re.escape(self.certificate).replace(r"\*", "[^/]*").replace(r"\{tenant\}", "([^/]+)")
        for name in names:
            found = re.fullmatch(pattern, name)
            if found is not None:
                return frozenset(self.tenants or found.groups())
        return None

    def is_for_token(self, token: str) -> bool:
        """Whether this is the rule for who has the token."""
        digest = hashlib.sha256(token.encode()).hexdigest()
        return bool(self.token_sha256) and hmac.compare_digest(digest, self.token_sha256)


class AccessRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of an access file."""

    allow: tuple[Rule, ...] = ()

    @property
    def need_certificates(self) -> bool:
        """Whether any rule looks at certificates."""
        return any(rule.certificate for rule in self.allow)

    def admission(self, names: Sequence[str], token: str) -> Admission:
        """What a client with these names in its certificate, and this token, may: what any rule for it
        allows.
        """
        tenants: set[str] = set()
        lend = admin = False
        for rule in self.allow:
            allowed = rule.tenants_of(names) if rule.certificate else None
            if token and rule.is_for_token(token):
                allowed = frozenset(rule.tenants)
            if allowed is not None:
                tenants |= allowed
                lend, admin = lend or rule.lend, admin or rule.admin
        return Admission(frozenset(tenants), lend, admin)


def load_rules(file: str | Path) -> AccessRules:
    """The rules in a file. Raises ConfigError."""
    try:
        return msgspec.toml.decode(Path(file).read_bytes(), type=AccessRules)
    except OSError as error:
        raise ConfigError(f"the access file {file} cannot be read: {error.strerror or error}") from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ConfigError(f"the access file {file} cannot be used: {error}") from None
