"""What structs say of their attributes, for those who show their values."""

from __future__ import annotations

import re

__all__ = ["attributes_of"]


def attributes_of(kind: type) -> dict[str, str]:
    """What the docstring of a struct says of its attributes, in their order."""
    _, _, said = (kind.__doc__ or "").partition("Attributes:")
    found = re.findall(r"(\w+): (.*?)(?=\.? \w+: |$)", " ".join(said.split()))
    return {name: text.rstrip(".").replace("``", "") for name, text in found}
