"""The suite that every driver passes, over a double of libibverbs that keeps to the rules of verbs."""

from typing import Any

from mooncake_transfer.testing import DriverConformance, Quirks


class TestVerbs(DriverConformance):
    driver = "verbs_double"
    quirks = Quirks(notices=True)

    def test_no_rule_of_verbs_was_broken(self, fabric: Any) -> None:
        """Runs last: the double counts overflows, illegal states, what was left behind and the like."""
        assert fabric.violations == 0
