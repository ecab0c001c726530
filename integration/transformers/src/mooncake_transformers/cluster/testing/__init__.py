"""For tests that want a whole cluster: ``mooncake serve`` as a child process, and a small model for it."""

from mooncake_transformers.cluster.testing.chat_model import save_chat_model
from mooncake_transformers.cluster.testing.gateway import Gateway, GatewayAnswer, stream_events
from mooncake_transformers.cluster.testing.served import MOONCAKE, ServedCluster, run_mooncake, wait_until

__all__ = [
    "MOONCAKE",
    "Gateway",
    "GatewayAnswer",
    "ServedCluster",
    "run_mooncake",
    "save_chat_model",
    "stream_events",
    "wait_until",
]
