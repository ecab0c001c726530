"""Who may act for which tenant of a store: ``rules`` are what an access file says, ``gate`` applies them.

A client proves who it is by the certificate of its engine (mutual TLS, ``TransferConfig.tls``), or by a
token. Certificates need the extra ``access``.
"""

from mooncake_store.access.gate import Gate
from mooncake_store.access.rules import AccessRules, Admission, Rule, load_rules

__all__ = ["AccessRules", "Admission", "Gate", "Rule", "load_rules"]
