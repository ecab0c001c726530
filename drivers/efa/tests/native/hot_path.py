"""``hot_path.py PROBE DOUBLE SECONDS OPERATIONS``, with PROBE preloaded: prints what it measured as JSON.

PROBE is hot_path.cpp as a library, DOUBLE the double of libfabric.
"""

from __future__ import annotations

import ctypes
import json
import sys

from mooncake_driver_efa import plugin


class HotPath(ctypes.Structure):
    """What hot_path() finds."""

    _fields_ = [
        *(
            (name, ctypes.c_uint64)
            for name in ("operations", "doorbells", "allocations", "allocations_before")
        ),
        ("operations_per_cpu_s", ctypes.c_double),
    ]


def main(probe: str, double: str, seconds: str, operations: str) -> None:
    """Have the installed core do operations that are over at once."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = ctypes.c_void_p(pointer(plugin.load(), b"mooncake.driver.v1"))
    found = HotPath()
    ctypes.CDLL(probe).hot_path(
        table,
        double.encode(),
        ctypes.c_double(float(seconds)),
        ctypes.c_uint64(int(operations)),
        ctypes.byref(found),
    )
    sys.stdout.write(json.dumps({name: getattr(found, name) for name, _ in found._fields_}))


if __name__ == "__main__":
    main(*sys.argv[1:])
