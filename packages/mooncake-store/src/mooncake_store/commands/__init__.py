"""Commands of ``mooncake store`` that work on a running store, in the order of the help."""

from mooncake_store.commands.copies import copy, drain, move, replicate
from mooncake_store.commands.node import node
from mooncake_store.commands.objects import end_session, get, ls, pin, put, rm, stat
from mooncake_store.commands.serving import rest
from mooncake_store.commands.watching import dashboard, top

__all__ = ["COMMANDS"]

COMMANDS = (
    put,
    get,
    ls,
    stat,
    rm,
    pin,
    end_session,
    copy,
    move,
    replicate,
    drain,
    node,
    rest,
    top,
    dashboard,
)
