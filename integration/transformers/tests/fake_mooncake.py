"""Stands in for the ``mooncake`` program in tests of the supervisor: its conventions, nothing behind them.

Takes the real command lines. A model called ``missing`` makes workers fail as a real one does, ``slow`` keeps
them from ever being ready, ``stubborn`` lets them ignore SIGTERM, ``doomed`` lets them die once ready.
"""

import json
import os
import signal
import socket
import sys
import threading


def option(name: str, default: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def die_with_parent(fd: int) -> None:
    while os.read(fd, 64):
        pass
    os._exit(70)


def main() -> None:
    model = option("--model", "")
    threading.Thread(target=die_with_parent, args=(int(option("--lifeline-fd", "")),), daemon=True).start()
    if model == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if model == "missing":
        sys.exit("error: UnknownModel: there is no folder 'missing'")
    listener = socket.create_server((option("--host", ""), int(option("--port", ""))))
    address = "{}:{}".format(*listener.getsockname())
    sys.stderr.write(f"listening on {address}\n")
    if model != "slow":
        message = {"address": address} if "store" in sys.argv else {"url": f"http://{address}"}
        with open(int(option("--ready-fd", "")), "w") as ready:
            ready.write(json.dumps(message) + "\n")
    if model == "doomed":
        sys.exit("error: ModelFailed: as was to be expected")
    threading.Event().wait()


if __name__ == "__main__":
    main()
