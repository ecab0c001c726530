"""A child that is forked while threads are in the driver's functions can use the driver itself."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mooncake_driver_tcp import _core

FORKS = 60
DEADLINE_S = 60
CLOSED = 10  # MC_CLOSED
UNKNOWN = 1 << 40


class Driver:
    """The C functions of the driver that need no endpoint, or only its handle."""

    def __init__(self) -> None:
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype = ctypes.c_void_p
        pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        self._table = pointer(_core.driver(), b"mooncake.driver.v1")
        handle = ctypes.c_uint64
        self._open = self._function(0, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(handle))
        self.close = self._function(1, None, handle)
        self._stats = self._function(3, ctypes.c_int, handle, ctypes.c_void_p)
        self._room = ctypes.create_string_buffer(512)

    def _function(self, index: int, *signature: Any) -> Callable[..., Any]:
        """After two 32-bit versions, the size and the name of mc_driver_v1."""
        at = self._table + 24 + index * ctypes.sizeof(ctypes.c_void_p)
        address = ctypes.c_void_p.from_address(at).value
        assert address is not None
        return ctypes.CFUNCTYPE(*signature)(address)

    def open(self) -> int:
        handle = ctypes.c_uint64()
        assert self._open(None, 0, ctypes.byref(handle)) == 0
        return handle.value

    def stats(self, handle: int) -> int:
        return int(self._stats(handle, ctypes.byref(self._room)))


@contextmanager
def calling(driver: Driver) -> Iterator[None]:
    """Two threads are always in the driver meanwhile."""
    ended = threading.Event()

    def call() -> None:
        while not ended.is_set():
            driver.stats(UNKNOWN)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_a_child_forked_in_the_middle_of_calls_opens_endpoints() -> None:
    driver = Driver()
    parents = driver.open()
    with calling(driver), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of forks with threads
        for _ in range(FORKS):
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(DEADLINE_S)  # ends it when it hangs
                forbidden = driver.stats(parents) == CLOSED
                driver.close(driver.open())
                os._exit(0 if forbidden else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    driver.close(parents)
