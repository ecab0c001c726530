"""``mooncake serve`` as a person uses it."""

from __future__ import annotations

import re
import shutil
import subprocess
import urllib.request

import pytest

from mooncake_transformers.cluster.testing import ServedCluster

pytestmark = pytest.mark.slow


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as response:
        assert response.status == 200
        return str(response.read().decode())


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_printed_curl_line_streams_an_answer(served: ServedCluster) -> None:
    printed = re.search(r"curl -N .*\n.*'", served.log())
    assert printed is not None, served.log()
    done = subprocess.run(
        ["sh", "-c", printed.group()], capture_output=True, text=True, timeout=60, check=True
    )
    events = [line for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert len(events) > 64
    assert events[-1] == "data: [DONE]"


def test_health_is_good(served: ServedCluster) -> None:
    assert get(f"{served.url}/health")


def test_every_process_has_metrics(served: ServedCluster) -> None:
    urls = [part["endpoint"] for part in served.ready_message()["parts"] if part["role"] != "store"]
    assert len(urls) == 3
    for url in urls:
        text = get(f"{url}/metrics")
        assert re.search(r"^# TYPE mooncake_\w+ counter$", text, re.MULTILINE), url
        assert re.search(r"^mooncake_\w+(\{.*\})? [0-9.e+]+$", text, re.MULTILINE), url


def test_its_output_in_a_log_is_plain_lines(served: ServedCluster) -> None:
    lines = served.log().splitlines()
    assert "\x1b" not in served.log()
    for part in ("store master", "prefill-0", "decode-0", "conductor"):
        assert [line for line in lines if part in line and " ready " in line], part


def test_children_are_processes_of_their_own(served: ServedCluster) -> None:
    assert served.child("--role", "prefill").pid != served.child("--role", "decode").pid
    assert served.child("store", "master").is_running()
    assert served.child("conductor", "--worker").is_running()
