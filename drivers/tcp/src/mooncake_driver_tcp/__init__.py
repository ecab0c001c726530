"""Moves bytes between Mooncake engines over TCP."""
