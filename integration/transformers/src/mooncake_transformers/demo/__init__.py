"""The demo: a timed conversation with a cluster on this machine, compared with the model run whole."""

from mooncake_transformers.demo._errors import DemoError, RequestFailed, StreamBroken
from mooncake_transformers.demo.client import Answer, ChatClient
from mooncake_transformers.demo.report import Report

__all__ = ["Answer", "ChatClient", "DemoError", "Report", "RequestFailed", "StreamBroken"]
