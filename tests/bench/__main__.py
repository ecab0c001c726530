"""``hatch run bench NAME``: this project and its peers, by turns in one run. Without a name: what there is.

A benchmark is a typer command, registered in BENCHES; it makes rows (rows.py) and hands them to ``report``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import peers
import typer
from cost import cost
from efa.command import efa
from ep.command import ep
from nvlink import nvlink
from nvmeof.command import nvmeof
from rich.console import Console
from store.command import store
from transfer.command import transfer
from transfer.pools import cxl
from verbs.command import verbs

BENCHES = {
    "transfer": transfer,
    "cost": cost,
    "cxl": cxl,
    "efa": efa,
    "ep": ep,
    "nvlink": nvlink,
    "nvmeof": nvmeof,
    "store": store,
    "verbs": verbs,
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)
for name, bench in BENCHES.items():
    app.command(name)(bench)


@app.callback(invoke_without_command=True)
def prepare(
    context: typer.Context,
    setup: Annotated[bool, typer.Option("--setup", help="Install the peers and stop.")] = False,
    folder: Annotated[Path, typer.Option("--peers", help="Where the peers are installed.")] = (
        peers.DEFAULT_FOLDER
    ),
) -> None:
    """Measure this project and its peers, by turns in one run."""
    context.obj = folder
    console = Console()
    if setup:
        missing = False
        for environment in peers.ENVIRONMENTS.values():
            try:
                console.print(f"{environment.versions}: {peers.python_of(environment, folder)}", markup=False)
            except peers.PeerMissing as reason:
                missing = True
                console.print(f"absent: {reason}", markup=False)
        raise typer.Exit(int(missing))
    if context.invoked_subcommand is None:
        console.print(f"benchmarks: {', '.join(BENCHES)}; see `hatch run bench NAME --help`")


if __name__ == "__main__":
    app()
