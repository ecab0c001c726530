"""What plugins of the store are tested with. Needs pytest; never imported by library code.

A policy's test is::

    from mooncake_store.testing import EvictionContract

    class TestMine(EvictionContract):
        def make(self):
            return Mine()
"""

import pytest

# Before the module is imported, so that its failed assertions show values as those of test files do.
pytest.register_assert_rewrite("mooncake_store.testing.eviction", "mooncake_store.testing.tiers")

from mooncake_store.testing.eviction import EvictionContract  # noqa: E402
from mooncake_store.testing.tiers import TierContract  # noqa: E402

__all__ = ["EvictionContract", "TierContract"]
