"""The exceptions of this package, by their public address. The tree is drawn in :class:`StoreError`'s
module.
"""

from mooncake_store._errors import (
    ConfigError,
    KeyExists,
    KeyInvalid,
    KeyNotFound,
    MasterError,
    MasterRefused,
    MasterUnreachable,
    PutFailed,
    SizeMismatch,
    StoreClosed,
    StoreError,
    StoreFull,
    ValueInvalid,
)

__all__ = [
    "ConfigError",
    "KeyExists",
    "KeyInvalid",
    "KeyNotFound",
    "MasterError",
    "MasterRefused",
    "MasterUnreachable",
    "PutFailed",
    "SizeMismatch",
    "StoreClosed",
    "StoreError",
    "StoreFull",
    "ValueInvalid",
]
