"""Settings: defaults, environment, and values that cannot work."""

import pytest

from mooncake_conductor.config import ConductorConfig, load_config, worker_url
from mooncake_conductor.errors import ConfigError


def test_options_win_over_the_environment_and_that_over_defaults() -> None:
    environment = {
        "MOONCAKE_CONDUCTOR_PORT": "8000",
        "MOONCAKE_CONDUCTOR_IDLE_TIMEOUT_S": "2.5",
        "MOONCAKE_CONDUCTOR_WORKERS": "http://a:1,http://b:2",
        "PATH": "/bin",
    }
    config = load_config({"port": 9000, "host": None}, environment)
    assert (config.port, config.host, config.idle_timeout_s) == (9000, "127.0.0.1", 2.5)
    assert config.workers == ("http://a:1", "http://b:2")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 70000}, "outside 0..65535"),
        ({"idle_timeout_s": 0}, "idle_timeout_s is 0"),
        ({"body_limit_bytes": -1}, "body_limit_bytes is -1"),
        ({"workers": ("localhost",)}, "not the URL of a worker"),
        ({"prot": 1}, "prot"),
        ({"port": "many"}, "port"),
    ],
)
def test_a_value_that_cannot_work_is_refused(values, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(values, {})


def test_an_unknown_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match="colour"):
        load_config({}, {"MOONCAKE_CONDUCTOR_COLOUR": "blue"})


def test_a_worker_has_one_spelling() -> None:
    assert worker_url(" http://127.0.0.1:8100/ ") == "http://127.0.0.1:8100"


@pytest.mark.parametrize(
    "text", ["", "127.0.0.1:80", "ftp://a", "http://", "http://a:0", "http://a:x", "http://["]
)
def test_what_is_no_url_of_a_worker_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not the URL of a worker"):
        worker_url(text)


def test_the_default_configuration_is_usable() -> None:
    assert ConductorConfig() == load_config({}, {})
