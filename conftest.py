"""What holds for every test of this tree."""

from __future__ import annotations

from hypothesis import settings

# A busy machine is no failure: single examples have no time limit, pytest's own limit for a test stands.
settings.register_profile("mooncake", deadline=None, print_blob=True)
settings.load_profile("mooncake")
