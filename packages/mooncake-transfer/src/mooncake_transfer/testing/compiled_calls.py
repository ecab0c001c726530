"""``mc_calls_v1`` (abi/mooncake_calls.h) by ctypes: to call it, and to be in between when others do."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

__all__ = ["WRITE", "CallsV1", "table_of", "watched"]

NAME = b"mooncake.calls.v1"
POINTER, U64 = ctypes.c_void_p, ctypes.c_uint64
OUT = ctypes.POINTER(ctypes.c_void_p)
WRITE = ctypes.CFUNCTYPE(None, POINTER, POINTER, ctypes.c_size_t)
KEEP = ctypes.PYFUNCTYPE(POINTER, POINTER, ctypes.py_object)
DROP = ctypes.CFUNCTYPE(None, POINTER)
CALL = ctypes.CFUNCTYPE(
    ctypes.c_int, POINTER, U64, ctypes.c_char_p, POINTER, ctypes.c_size_t, U64, POINTER, WRITE, OUT
)
BEGIN = ctypes.CFUNCTYPE(POINTER, POINTER, ctypes.c_int, POINTER, POINTER, U64, U64, U64, OUT)
FINISH = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, U64, OUT)
RAISE = ctypes.PYFUNCTYPE(None, POINTER)


class CallsV1(ctypes.Structure):
    """The table; ``raise`` is a word of Python's, hence ``raise_failure``."""

    _fields_ = (
        ("abi_major", ctypes.c_uint32),
        ("abi_minor", ctypes.c_uint32),
        ("struct_size", ctypes.c_size_t),
        ("context", POINTER),
        ("keep_region", KEEP),
        ("keep_remote", KEEP),
        ("drop_region", DROP),
        ("drop_remote", DROP),
        ("call", CALL),
        ("begin", BEGIN),
        ("finish", FINISH),
        ("cancel", DROP),
        ("end", DROP),
        ("raise_failure", RAISE),
    )


# What capsules given out by watched() point to: their users do not say when they are done.
_kept: list[Any] = []


def table_of(capsule: object) -> CallsV1:
    """The table of ``TransferEngine.compiled_calls()``, as long as the capsule lives."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return CallsV1.from_address(get(capsule, NAME))


def watched(capsule: object, before: Callable[[str], None]) -> object:
    """A capsule for compiled code that does the same, after
    ``before("call" | "begin" | "finish" | "end")``.

    Kept for as long as the process lives.
    """
    table, mine = table_of(capsule), CallsV1()
    ctypes.memmove(ctypes.byref(mine), ctypes.byref(table), ctypes.sizeof(CallsV1))

    def call(*arguments: Any) -> int:
        before("call")
        return int(table.call(*arguments))

    def begin(*arguments: Any) -> int:
        before("begin")
        return table.begin(*arguments) or 0

    def finish(*arguments: Any) -> int:
        before("finish")
        return int(table.finish(*arguments))

    def end(run: Any) -> None:
        before("end")
        table.end(run)

    functions = CALL(call), BEGIN(begin), FINISH(finish), DROP(end)
    mine.call, mine.begin, mine.finish, mine.end = functions
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (POINTER, ctypes.c_char_p, POINTER)
    made: object = make(ctypes.addressof(mine), NAME, None)
    _kept.append((capsule, mine, functions, NAME, made))
    return made
