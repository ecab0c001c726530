"""Applies access rules to the requests of clients, before the master looks at them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mooncake_store import protocol
from mooncake_store._errors import ConfigError, NotAuthorised
from mooncake_store.access.certificate import names_of, require_reader
from mooncake_store.access.rules import AccessRules, Admission
from mooncake_store.keys import object_digests
from mooncake_store.protocol import Request
from mooncake_transfer import Caller

__all__ = ["Gate"]

Own = Callable[[bytes, str], bytes]
# What a client that is trusted with its own tenant only may ask; by name, because some come with parts of the
# protocol. Whatever is not here, such as handing over a ledger, is for who lends memory, or for admins.
FOR_TENANTS = frozenset(
    {
        "AskCopies",
        "Commit",
        "EndSession",
        "Exist",
        "FindOwners",
        "FindReplicas",
        "GetSizes",
        "GetStats",
        "Heartbeat",
        "Locate",
        "LookAfterCopies",
        "Pin",
        "Release",
        "Remove",
        "RemoveAll",
        "Renew",
        "Reserve",
        "Unmount",
        "Unpin",
        "Reach",
    }
)
FOR_ADMINS = frozenset({"GetReport"})


class Gate:
    """Knows what each connection may. Not thread-safe.

    Who asks from the master's own process is not asked who they are.
    """

    def __init__(self, rules: AccessRules, *, encrypted: bool) -> None:
        """``encrypted``: callers show certificates. Raises ConfigError when rules need what is missing."""
        if rules.need_certificates:
            if not encrypted:
                raise ConfigError(
                    "access rules name certificates, but the master's engine has no TransferConfig.tls, so "
                    "nobody shows one"
                )
            require_reader()
        self._rules = rules
        self._tokens: dict[int, str] = {}
        self._members: dict[int, tuple[int, str, Admission]] = {}

    def take_token(self, caller: Caller, token: str) -> None:
        """A connection has shown a token."""
        self._tokens[caller.connection] = token

    def admit(self, request: protocol.Mount, caller: Caller) -> None:
        """Let a client join, or raise NotAuthorised."""
        names = names_of(caller.certificate) if caller.certificate else []
        token = self._tokens.get(caller.connection, "")
        admission = self._rules.admission(names, token)
        who = _described(names, token)
        may_act = admission.may_act_for(request.tenant)
        # Who only lends acts for nobody, and names no tenant.
        if not (may_act or (admission.lend and not request.tenant)):
            raise NotAuthorised(
                f"{who} may not act for tenant {request.tenant!r}; it may for "
                f"{sorted(admission.tenants) or 'none'}; see the master's access file"
            )
        if request.nbytes and not admission.lend:
            raise NotAuthorised(f"{who} may not lend memory; open the store with lend_bytes=0")
        self._members[request.client] = (caller.connection, request.tenant, admission)

    def check(self, request: Request, caller: Caller, own: Own) -> None:
        """Raise NotAuthorised when a member's request goes beyond what it may.

        Objects of other tenants that it names are not there for it: ``own`` gives the digests without them.
        """
        if not isinstance(request, protocol.FromMember):
            return
        connection, tenant, admission = self._members.get(request.client, (0, "", Admission()))
        if connection != caller.connection:
            return  # no member, which the master tells it
        name = type(request).__name__
        if isinstance(request, protocol.Drain) and request.segment and not admission.admin:
            raise NotAuthorised("segments of others are drained by admins")
        if name in FOR_ADMINS and not admission.admin:
            raise NotAuthorised(f"{name} concerns all tenants, and is for admins")
        if admission.trusted:
            return
        if name not in FOR_TENANTS:
            raise NotAuthorised(f"{name} is for who lends memory, and for admins")
        if isinstance(request, protocol.Reserve):
            _require_own(request, tenant)
        elif hasattr(request, "digests"):
            request.digests = own(request.digests, tenant)

    def confines(self, client: int) -> bool:
        """Whether this client may see objects of its own tenant only."""
        _, _, admission = self._members.get(client, (0, "", Admission()))
        return not admission.trusted

    def forget(self, caller: Caller) -> None:
        """A connection has ended."""
        self._tokens.pop(caller.connection, None)
        for client, (connection, _, _) in list(self._members.items()):
            if connection == caller.connection:
                del self._members[client]


def _require_own(request: protocol.Reserve, tenant: str) -> None:
    # The digest names the object in the master; it must be made of this tenant's name and the key given.
    if request.digests != object_digests(tenant, request.keys):
        raise NotAuthorised(f"the digests of a put are not those of its keys of tenant {tenant!r}")


def _described(names: Sequence[str], token: str) -> str:
    if names:
        return f"a client with certificate {', '.join(names)}"
    return "a client with this token" if token else "a client without certificate and token"
