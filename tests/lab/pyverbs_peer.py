"""An independent peer: a queue pair made by pyverbs, for an endpoint's regions and notices."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mooncake_driver_verbs.testing import NOTICE_BYTES, Control, Imported, QueuePairs, parse_address

DEBIAN = Path("/usr/lib/python3/dist-packages/pyverbs")
POLL_S = 60.0


def find_pyverbs() -> None:
    """Have this Python find pyverbs: Debian's, where it has none of its own."""
    if DEBIAN.is_dir() and not any(Path(path, "pyverbs").exists() for path in sys.path):
        folder = tempfile.mkdtemp()
        Path(folder, "pyverbs").symlink_to(DEBIAN)
        sys.path.append(folder)


def _pyverbs(module: str) -> Any:
    find_pyverbs()
    return importlib.import_module(f"pyverbs.{module}")


class PyverbsPeer:
    """One reliable queue pair on a device, connected to an endpoint by its control protocol."""

    def __init__(self, device: str, address: bytes, nbytes: int) -> None:
        self.e = _pyverbs("enums")
        qp = _pyverbs("qp")
        self.context = _pyverbs("device").Context(name=device)
        self.pd = _pyverbs("pd").PD(self.context)
        self.cq = _pyverbs("cq").CQ(self.context, 16)
        self.mr = _pyverbs("mr").MR(self.pd, nbytes, self.e.IBV_ACCESS_LOCAL_WRITE)
        cap = qp.QPCap(max_send_wr=8, max_recv_wr=1)
        init = qp.QPInitAttr(qp_type=self.e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap)
        self.qp = qp.QP(self.pd, init)
        self.attr = qp.QPAttr(port_num=1)
        self.qp.to_init(self.attr)
        self.gid_index = self._ipv4_gid()
        gid = self.context.query_gid(1, self.gid_index).gid
        port = self.context.query_port(1)
        mine = QueuePairs(((self.qp.qp_num, 0),), bytes.fromhex(gid.replace(":", "")), port.active_mtu)
        self.control = Control(parse_address(address))
        self.theirs = self.control.greet(mine, os.urandom(16))
        self._connect(mine, self.theirs)

    def _ipv4_gid(self) -> int:
        for index in range(4):
            if "0000:0000:0000:0000:0000:ffff" in self.context.query_gid(1, index).gid:
                return index
        raise LookupError("the device has no IPv4 address")

    def _connect(self, mine: QueuePairs, theirs: QueuePairs) -> None:
        addr = _pyverbs("addr")
        words = theirs.gid.hex()
        dgid = addr.GID(":".join(words[at : at + 4] for at in range(0, 32, 4)))
        route = addr.GlobalRoute(dgid=dgid, sgid_index=self.gid_index, hop_limit=64)
        self.attr.ah_attr = addr.AHAttr(gr=route, is_global=1, port_num=1)
        self.attr.path_mtu = min(mine.mtu, theirs.mtu)
        (self.attr.dest_qp_num, self.attr.rq_psn) = theirs.numbers[0]
        self.attr.max_dest_rd_atomic = self.attr.max_rd_atomic = 1
        self.attr.min_rnr_timer, self.attr.timeout = 12, 14
        self.attr.retry_cnt = self.attr.rnr_retry = 7
        self.attr.sq_psn = mine.numbers[0][1]
        self.qp.to_rtr(self.attr)
        self.qp.to_rts(self.attr)

    def write(self, region: Imported, data: bytes, *, rkey: int | None = None) -> int:
        """Write to the front of a region; returns the completion's status."""
        self.mr.write(data, len(data))
        to = (region.rkeys[0] if rkey is None else rkey, region.address)
        return self._move(self.e.IBV_WR_RDMA_WRITE, len(data), to)

    def read(self, region: Imported, nbytes: int) -> tuple[int, bytes]:
        """Read from the front of a region; returns the completion's status and the bytes."""
        status = self._move(self.e.IBV_WR_RDMA_READ, nbytes, (region.rkeys[0], region.address))
        return status, bytes(self.mr.read(nbytes, 0))

    def notify(self, place: int, data: bytes) -> int:
        """Write a notice into a place of the endpoint; returns the completion's status."""
        places = self.theirs.places
        assert places is not None
        self.mr.write(data, len(data))
        to = (places.rkey, places.address + place * NOTICE_BYTES)
        return self._move(self.e.IBV_WR_RDMA_WRITE_WITH_IMM, len(data), to, socket.htonl(place))

    def send(self, data: bytes) -> int:
        """Send a notice as a message, as older peers do; returns the completion's status."""
        self.mr.write(data, len(data))
        return self._move(self.e.IBV_WR_SEND, len(data))

    def _move(self, opcode: int, nbytes: int, to: tuple[int, int] | None = None, immediate: int = 0) -> int:
        wr = _pyverbs("wr")
        sge = wr.SGE(self.mr.buf, nbytes, self.mr.lkey)
        signalled = self.e.IBV_SEND_SIGNALED
        request = wr.SendWR(opcode=opcode, num_sge=1, imm_data=immediate, sg=[sge], send_flags=signalled)
        if to is not None:
            request.set_wr_rdma(*to)
        self.qp.post_send(request)
        end_s = time.monotonic() + POLL_S
        while time.monotonic() < end_s:
            count, completions = self.cq.poll()
            if count:
                status: int = completions[0].status
                return status
        raise TimeoutError("no completion")

    def close(self) -> None:
        """End it, the endpoint's side too."""
        self.control.close()
        for thing in (self.qp, self.cq, self.mr, self.pd, self.context):
            thing.close()
