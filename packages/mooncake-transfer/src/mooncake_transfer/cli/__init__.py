"""The ``mooncake`` program: every installed package adds its commands through the ``mooncake_cli`` hook."""

from __future__ import annotations

import typer

from mooncake_transfer.cli.bench import bench_commands
from mooncake_transfer.cli.config import config
from mooncake_transfer.cli.doctor import doctor
from mooncake_transfer.cli.metadata import metadata
from mooncake_transfer.cli.top import top
from mooncake_transfer.cli.topology import topology
from mooncake_transfer.plugins import CLI_GROUP, load_plugins

__all__ = ["build_app", "main"]


def build_app() -> typer.Typer:
    """Assemble the program from every installed package's commands; a broken package only loses its own."""
    app = typer.Typer(
        name="mooncake",
        help="KV-cache-centric, disaggregated serving for large language models.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_describe_program)
    app.command()(doctor)
    app.command()(topology)
    app.add_typer(bench_commands)
    app.add_typer(config, name="config")
    app.add_typer(metadata, name="metadata")
    app.command()(top)
    load_plugins(CLI_GROUP).manager.hook.mooncake_cli(app=app)
    return app


def _describe_program() -> None:
    """KV-cache-centric, disaggregated serving for large language models."""


def main() -> None:
    """Entry point of the ``mooncake`` command."""
    build_app()()
