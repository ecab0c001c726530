"""Options of the template driver, as users write them under ``TransferConfig.driver_options["template"]``."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from mooncake_transfer.driver_options import as_text, check_limits, checked

__all__ = ["TemplateOptions", "render"]

LIMITS: dict[str, tuple[float, float]] = {"timeout_s": (0.001, 3600)}  # inclusive


class TemplateOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one endpoint. Raises ConfigError for values that cannot work.

    Attributes:
        timeout_s: a peer that neither sends nor receives for so long, while it should, counts as gone.
    """

    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        check_limits("template", self, LIMITS)


def render(options: Mapping[str, object]) -> dict[str, str]:
    """Check options and turn them into the strings that the compiled core reads. Raises ConfigError."""
    return as_text(checked("template", TemplateOptions, options))
