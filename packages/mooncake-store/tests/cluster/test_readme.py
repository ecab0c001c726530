"""The lines of the page that start a cluster, as they stand there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
LIMIT_S = 60.0


def test_the_cluster_of_the_page_starts_and_holds_a_value(
    tmp_path: Path, require_program: Callable[[str], None]
) -> None:
    require_program("etcd")
    (lines,) = re.findall(r"```sh\n(.*?--cluster.*?)```", README.read_text(), re.DOTALL)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    said, log = tmp_path / "said", tmp_path / "log"
    with said.open("wb") as output, log.open("wb") as errors:
        shell = subprocess.Popen(
            ["bash", "-euc", lines],
            cwd=tmp_path,
            env=environment,
            stdout=output,
            stderr=errors,
            start_new_session=True,  # which everything that is started in the background shares
        )
    try:
        status = shell.wait(LIMIT_S)
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait(LIMIT_S)
    assert status == 0, log.read_text(errors="replace")
    assert "hello" in said.read_text().splitlines(), log.read_text(errors="replace")
