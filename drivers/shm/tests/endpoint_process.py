"""A process with one endpoint and one region, which obeys lines on its input.

Usage: endpoint_process.py NBYTES SHAREABLE(0|1) [option=value ...]. It first writes its address in hex, then
one line for every line that it reads. Ends with its input.
"""

from __future__ import annotations

import sys

from driver_table import DEADLINE_S, MAY_READ, MAY_WRITE, WRITE, Endpoint, Failed, Op, deadline_ns

REGION, KEY = 7, bytes(range(16))


def obey(endpoint: Endpoint, region: int, memory: memoryview, words: list[str]) -> str:
    """Carry out one command; return the answer."""
    match words:
        case ["grant", key, access]:
            endpoint.grant(region, bytes.fromhex(key), MAY_READ if access == "r" else MAY_WRITE)
        case ["revoke", "all"]:
            endpoint.revoke(region, None, deadline_ns(DEADLINE_S))
        case ["revoke", key]:
            endpoint.revoke(region, bytes.fromhex(key), deadline_ns(DEADLINE_S))
        case ["fill", value]:
            memory[:] = bytes([int(value)]) * len(memory)
        case ["values"]:
            return " ".join(str(value) for value in sorted(set(bytes(memory))))
        case ["write-for-ever", address, region_id, key]:
            write_for_ever(endpoint, region, len(memory), address, int(region_id), key)
        case _:
            return f"unknown: {words}"
    return "done"


def write_for_ever(
    endpoint: Endpoint, region: int, nbytes: int, address: str, region_id: int, key: str
) -> None:
    """Keep writes to another process's region in flight until one fails."""
    connection = endpoint.connect(bytes.fromhex(address))
    remote = endpoint.import_key(connection, region_id, bytes.fromhex(key), nbytes)
    told = False
    while all(
        status == 0
        for status, _ in endpoint.run(
            Op(opcode=WRITE, connection=connection, local=region, remote=remote, length=nbytes)
            for _ in range(8)
        )
    ):
        if not told:
            sys.stdout.write("writing\n")
            sys.stdout.flush()
        told = True


def main() -> None:
    """Serve."""
    nbytes, shareable = int(sys.argv[1]), sys.argv[2] == "1"
    options = dict(item.split("=", 1) for item in sys.argv[3:])
    with Endpoint(**options) as endpoint:
        region, memory = endpoint.allocate(nbytes, REGION, KEY, shareable=shareable)
        sys.stdout.write(endpoint.address().hex() + "\n")
        sys.stdout.flush()
        for line in sys.stdin:
            try:
                answer = obey(endpoint, region, memory, line.split())
            except Failed as failure:
                answer = str(failure)
            sys.stdout.write(answer + "\n")
            sys.stdout.flush()
        memory.release()


if __name__ == "__main__":
    main()
