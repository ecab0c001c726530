"""A master: what it decides (``state``, in groups by topic), and the server around that (``server``).

A group (see ``context.Group``) handles the requests of one topic; ``state.GROUPS`` is the table of all.
"""

from mooncake_store.master.server import Master, master_of

__all__ = ["Master", "master_of"]
