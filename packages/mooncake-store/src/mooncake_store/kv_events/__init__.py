"""KV events as vLLM and SGLang send them over ZMQ.

``wire``: the messages; ``publisher``: who sends them; ``segment``: those of what the store holds.

The publisher needs pyzmq: ``pip install mooncake-store[events]``.
"""
