"""`hatch run lab`: a command in a throw-away guest with the NUMA nodes, NICs, drives you choose."""

import sys

from vm.command import main

if __name__ == "__main__":
    sys.exit(main())
