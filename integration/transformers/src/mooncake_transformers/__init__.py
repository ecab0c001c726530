"""Serves Hugging Face causal language models with prefill and decode apart."""
