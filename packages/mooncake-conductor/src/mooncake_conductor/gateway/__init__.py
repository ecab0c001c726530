"""The HTTP face of a conductor: an OpenAI-compatible gateway, and the worker and index endpoints."""

from mooncake_conductor.gateway.app import build_app

__all__ = ["build_app"]
