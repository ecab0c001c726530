"""Lets ``python -m mooncake_transfer.cli`` do what ``mooncake`` does."""

from mooncake_transfer.cli import main

if __name__ == "__main__":
    main()
