"""Serves Hugging Face causal language models with prefill and decode apart.

``mooncake_transformers.worker.Worker`` is not imported here: it loads torch, which takes seconds.
"""

from mooncake_transformers import errors
from mooncake_transformers.config import WorkerConfig

__all__ = ["WorkerConfig", "errors"]
