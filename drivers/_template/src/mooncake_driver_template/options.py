"""Options of the template driver, as users write them under ``TransferConfig.driver_options["template"]``."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from mooncake_transfer.errors import ConfigError

__all__ = ["TemplateOptions", "render"]


class TemplateOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one endpoint. Raises ConfigError for values that cannot work.

    Attributes:
        timeout_s: a peer that neither sends nor receives for so long, while it should, counts as gone.
    """

    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ConfigError(f"template option timeout_s is {self.timeout_s}; it must be a positive number")


def render(options: Mapping[str, object]) -> dict[str, str]:
    """Check options and turn them into the strings that the compiled core reads. Raises ConfigError."""
    try:
        checked = msgspec.convert(dict(options), TemplateOptions)
    except msgspec.ValidationError as error:
        known = ", ".join(TemplateOptions.__struct_fields__)
        raise ConfigError(
            f"template driver options {dict(options)!r}: {error}; known options: {known}"
        ) from error
    return {name: str(value) for name, value in msgspec.structs.asdict(checked).items()}
