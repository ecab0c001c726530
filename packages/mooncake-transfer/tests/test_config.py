"""Settings from file, environment and arguments, with their origins and the errors of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mooncake_transfer import TransferConfig
from mooncake_transfer.cli import build_app
from mooncake_transfer.config import load_config
from mooncake_transfer.errors import ConfigError

FILE = """
[transfer]
host = "10.0.0.1"
port = 7000
drivers = ["shm", "tcp"]
driver_options.tcp.connections = 2
[transfer.rails]
attempts = 3
slow_ratio = 5
[store]
anything = 1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mooncake.toml"
    path.write_text(FILE)
    return path


def test_each_layer_covers_the_one_below_and_says_so(file: Path) -> None:
    environment = {
        "MOONCAKE_CONFIG": str(file),
        "MOONCAKE_TRANSFER_PORT": "7001",
        "MOONCAKE_TRANSFER_HOST": "10.0.0.2",
        "MOONCAKE_TRANSFER_RAILS__ATTEMPTS": "4",
        "MOONCAKE_TRANSFER_DRIVER_OPTIONS__TCP__CONNECTIONS": "4",
        "MOONCAKE_STORE_PORT": "1",
    }
    loaded = load_config(environment=environment, host="10.0.0.3")
    assert loaded.config == TransferConfig(
        host="10.0.0.3",
        port=7001,
        drivers=("shm", "tcp"),
        driver_options={"tcp": {"connections": 4}},
        rails=loaded.config.rails,
    )
    assert (loaded.config.rails.attempts, loaded.config.rails.slow_ratio) == (4, 5.0)
    assert loaded.origins == {
        "host": "argument",
        "port": "MOONCAKE_TRANSFER_PORT",
        "drivers": str(file),
        "driver_options.tcp.connections": "MOONCAKE_TRANSFER_DRIVER_OPTIONS__TCP__CONNECTIONS",
        "rails.attempts": "MOONCAKE_TRANSFER_RAILS__ATTEMPTS",
        "rails.slow_ratio": str(file),
    }


def test_the_environment_of_the_process_is_read(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.setenv("MOONCAKE_TRANSFER_DRIVERS", "tcp, shm")
    monkeypatch.setenv("MOONCAKE_TRANSFER_CONNECT_TIMEOUT_S", "1.5")
    config = TransferConfig.load(file, port=1)
    assert (config.drivers, config.connect_timeout_s, config.port) == (("tcp", "shm"), 1.5, 1)


def test_lists_numbers_and_nothing_are_written_as_text() -> None:
    environment = {
        "MOONCAKE_TRANSFER_PORT_RANGE": "7000,7010",
        "MOONCAKE_TRANSFER_TLS__CA_FILE": "ca",
        "MOONCAKE_TRANSFER_TLS__CERTIFICATE_FILE": "cert",
        "MOONCAKE_TRANSFER_TLS__KEY_FILE": "key",
        "MOONCAKE_TRANSFER_TLS__DATA": "true",
        "MOONCAKE_TRANSFER_DRIVER_OPTIONS__X__NAME": "eth0",
        "MOONCAKE_TRANSFER_DRIVER_OPTIONS__X__FAST": "true",
    }
    config = load_config(environment=environment).config
    assert config.port_range == (7000, 7010)
    assert config.tls is not None
    assert config.tls.data is True
    assert config.driver_options == {"x": {"name": "eth0", "fast": True}}


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        (
            "MOONCAKE_TRANSFER_PROT",
            "1",
            "_PROT: unknown setting 'prot'; did you mean 'port'?",
        ),
        ("MOONCAKE_TRANSFER_RAILS__ATTEMPT", "1", "did you mean 'rails.attempts'?"),
        ("MOONCAKE_TRANSFER_ZZZZ", "1", "unknown setting 'zzzz'; `mooncake config show`"),
        ("MOONCAKE_TRANSFER_PORT", "many", "MOONCAKE_TRANSFER_PORT: Expected `int`, got `str`"),
        ("MOONCAKE_TRANSFER_PORT", "70000", "port 70000 is outside 0..65535"),
        ("MOONCAKE_TRANSFER_RAILS__ATTEMPTS", "0", "rails.attempts is 0"),
        ("MOONCAKE_TRANSFER_ADVERTISE_HOST", "bad host", "advertise_host is 'bad host', which is no host"),
        ("MOONCAKE_TRANSFER_ADVERTISE_HOST", "[::1]", "without a port or brackets"),
        ("MOONCAKE_TRANSFER_HOST", "[::1]", "host is '[::1]', which is no host"),
        ("MOONCAKE_TRANSFER_ADVERTISE_HOST", "host:80", "without a port or brackets"),
        ("MOONCAKE_TRANSFER_ADVERTISE_HOST", "a" * 254, "which is no host"),
        ("MOONCAKE_CONFIG", "missing.toml", "missing.toml cannot be read"),
    ],
)
def test_a_setting_that_cannot_work_is_named_with_its_origin(variable: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environment={variable: text})
    assert said in str(caught.value)


@pytest.mark.parametrize("host", ["worker_1.pod-3.svc.", "10.0.0.1", "fe80::1%eth0", "::1", "münchen.de"])
def test_what_peers_are_told_is_any_name_or_address(host: str) -> None:
    assert TransferConfig(advertise_host=host).advertise_host == host


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("port = 1", "'port' stands outside a table; put it below [transfer]"),
        ("[transfr]\nport = 1", "did you mean [transfer]?"),
        ("[transfer]\nprot = 1", "did you mean 'port'?"),
        ("[transfer]\nrails.attempt = 1", "did you mean 'rails.attempts'?"),
        ("[transfer", "is no TOML"),
        ("[transfer]\nport = 'x'", "Expected `int`"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_the_file(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, environment={})
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)


def test_the_command_shows_values_with_origins_and_no_password(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, runner = build_app(), CliRunner()
    monkeypatch.setenv("MOONCAKE_TRANSFER_REGISTRY", "redis://user:pa:s/s@w0rd@host:1/0")
    shown = runner.invoke(app, ["config", "show", "--config", str(file), "--json"])
    assert shown.exit_code == 0
    settings = json.loads(shown.stdout)
    assert settings["host"] == {"value": "10.0.0.1", "origin": str(file)}
    assert settings["name"] == {"value": "", "origin": "default"}
    assert settings["rails.attempts"] == {"value": 3, "origin": str(file)}
    assert settings["registry"]["value"] == "redis://user:***@host:1/0"
    assert settings["registry"]["origin"] == "MOONCAKE_TRANSFER_REGISTRY"
    fields = {path.partition(".")[0] for path in settings}
    assert fields == set(TransferConfig.__struct_fields__)
    table = runner.invoke(app, ["config", "show", "--config", str(file)], env={"COLUMNS": "250"}).stdout
    assert "rails.slow_ratio" in table
    assert "default" in table


def test_the_help_of_the_command_names_the_table() -> None:
    shown = CliRunner().invoke(build_app(), ["config", "show", "--help"], env={"COLUMNS": "200"})
    assert "[transfer] table" in shown.stdout


def test_the_command_says_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(build_app(), ["config", "show", "--config", str(tmp_path / "none")])
    assert outcome.exit_code == 2
    assert outcome.stderr.count("\n") == 1
    assert "cannot be read" in outcome.stderr
