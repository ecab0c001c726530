"""For tests of this package and of who builds on it: tiny models, workers inside a test, an HTTP client."""

from mooncake_transformers.testing.client import Reply, TestClient
from mooncake_transformers.testing.running_worker import running_worker
from mooncake_transformers.testing.tiny_model import TINY_ARCHITECTURES, save_tiny_model

__all__ = ["TINY_ARCHITECTURES", "Reply", "TestClient", "running_worker", "save_tiny_model"]
