"""For tests of this package and of whoever builds on it: tiny models, and workers that run inside a test."""

from mooncake_transformers.testing.running_worker import running_worker
from mooncake_transformers.testing.tiny_model import TINY_ARCHITECTURES, save_tiny_model

__all__ = ["TINY_ARCHITECTURES", "running_worker", "save_tiny_model"]
