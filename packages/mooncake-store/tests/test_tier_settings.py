"""Tiers as files of settings say them."""

import pytest

from mooncake_store import errors
from mooncake_store.testing.tiers import LIMIT_S, read_one, record_of, value_of
from mooncake_store.tiers import WriteOutcome
from mooncake_store.tiers.config import TierConfig, open_tier, read_tiers


def test_a_file_says_which_tiers_there_are(tmp_path, monkeypatch):
    (tmp_path / "tiers.toml").write_text(
        f"""
[[tier]]
kind = "file"
path = "{tmp_path}/files"
capacity_bytes = 67108864
secret_env = "TIER_SECRET"

[[tier]]
kind = "directory"
path = "{tmp_path}/shared"
"""
    )
    monkeypatch.setenv("TIER_SECRET", "ab" * 32)
    configs = read_tiers(tmp_path / "tiers.toml")
    for config in configs:
        tier = open_tier(config)
        assert tier.write([record_of(1, 5000)], LIMIT_S) == [WriteOutcome.STORED]
        assert read_one(tier, 1, 5000) == value_of(1, 5000).tobytes()
        tier.close()
    monkeypatch.delenv("TIER_SECRET")
    with pytest.raises(errors.ConfigError, match="TIER_SECRET, which is not in the environment"):
        open_tier(configs[0])


def test_what_is_no_such_file_is_refused(tmp_path):
    (tmp_path / "tiers.toml").write_text('[[tier]]\nkind = "tape"\npath = "x"\n')
    with pytest.raises(errors.ConfigError, match="tape"):
        read_tiers(tmp_path / "tiers.toml")
    both = TierConfig(kind="directory", path=str(tmp_path), secret_file="a", secret_env="b")
    with pytest.raises(errors.ConfigError, match="give one of them"):
        open_tier(both)
