"""Runs inside the guest: what `mooncake doctor` says of it."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from mooncake_transfer.cli import build_app


def ask_doctor(**environment: str) -> dict[str, Any]:
    """Its report, with ``environment`` set as well: exit status, and by driver its devices or its reason."""
    done = CliRunner(env=environment).invoke(build_app(), ["doctor", "--json"])
    report = json.loads(done.stdout)
    return {
        "exit": done.exit_code,
        "kernel": report["versions"]["kernel"],
        "broken": report["broken_plugins"],
        "drivers": {each["name"]: each["devices"] or each["reason"] for each in report["drivers"]},
        "limits": {limit["name"]: limit["state"] for limit in report["limits"]},
    }
