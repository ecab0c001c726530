"""Moves bytes between Mooncake engines on one host through shared memory."""
