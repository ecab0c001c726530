"""Parts of ``mooncake_transfer.memory``."""
