"""What the options modules of drivers share."""

from __future__ import annotations

import msgspec
import pytest

from mooncake_transfer.driver_options import as_text, check_limits, checked
from mooncake_transfer.errors import ConfigError


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a driver that is not there."""

    depth: int = 4
    fast: bool = True
    host: str = "a"

    def __post_init__(self) -> None:
        check_limits("x", self, {"depth": (1, 8)})


def test_options_become_strings_that_a_core_can_read() -> None:
    assert as_text(checked("x", Options, {"depth": 8})) == {"depth": "8", "fast": "true", "host": "a"}
    assert as_text(Options(fast=False), without=("host",)) == {"depth": "4", "fast": "false"}


@pytest.mark.parametrize("depth", [0, 9])
def test_a_value_outside_its_limits_is_refused_with_both(depth: int) -> None:
    with pytest.raises(ConfigError, match=rf"x option depth is {depth}; it must be within 1\.\.8"):
        checked("x", Options, {"depth": depth})


@pytest.mark.parametrize("options", [{"deep": 1}, {"depth": "much"}])
def test_what_cannot_be_an_option_is_refused_with_what_can(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"x driver options .*known options: depth, fast, host"):
        checked("x", Options, options)
