"""``mooncake conductor``: what it cannot do is told in one line."""

from __future__ import annotations

from typer.testing import CliRunner

from mooncake_transfer.cli import build_app


def test_an_unknown_log_level_is_told_in_one_line() -> None:
    outcome = CliRunner().invoke(build_app(), ["conductor", "--log-level", "NOPE"])
    assert outcome.exit_code == 2
    assert "mooncake conductor: log level 'NOPE' is unknown" in outcome.stderr
    assert outcome.stderr.count("\n") == 1
