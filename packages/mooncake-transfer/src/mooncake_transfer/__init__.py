"""Moves batches of bytes between registered memory over any fabric."""
