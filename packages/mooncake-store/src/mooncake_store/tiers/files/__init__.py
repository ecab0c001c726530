"""Reading and writing pieces of files: by the nvmeof driver where it is installed, else by threads."""

from mooncake_store.tiers.files.access import Files, OpenFile, Piece, Running
from mooncake_store.tiers.files.choosing import open_files

__all__ = ["Files", "OpenFile", "Piece", "Running", "open_files"]
