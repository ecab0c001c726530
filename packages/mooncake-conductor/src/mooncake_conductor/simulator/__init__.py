"""Simulates a cluster that serves a trace, with the policies that the conductor runs."""
