"""The declarations of libibverbs' interface agree with the header of the machine, where there is one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from mooncake_transfer.testing.compiling import cxx

CORE = Path(__file__).parent.parent / "core"
HEADER = Path("/usr/include/infiniband/verbs.h")
# Ours, theirs, and members whose names differ.
STRUCTS = {
    "GidEntry": "ibv_gid_entry",
    "DeviceAttr": "ibv_device_attr",
    "PortAttr": "ibv_port_attr",
    "GlobalRoute": "ibv_global_route",
    "AhAttr": "ibv_ah_attr",
    "QpCap": "ibv_qp_cap",
    "QpAttr": "ibv_qp_attr",
    "Sge": "ibv_sge",
    "SendWr": "ibv_send_wr",
    "RecvWr": "ibv_recv_wr",
    "Wc": "ibv_wc",
    "Context": "ibv_context",
    "CompChannel": "ibv_comp_channel",
    "Mr": "ibv_mr",
    "QpInitAttr": "ibv_qp_init_attr",
    "AsyncEvent": "ibv_async_event",
}
# The library allocates these; only their beginnings are declared.
BEGINNINGS = {"Cq": "ibv_cq", "Qp": "ibv_qp"}
OTHER_NAMES = {"SendWr": {"xrc_srqn": "qp_type.xrc.remote_srqn", "rest": "bind_mw"}}
OPS = ("poll_cq", "req_notify_cq", "post_srq_recv", "post_send", "post_recv")
CONSTANTS = {
    "kPortActive": "IBV_PORT_ACTIVE",
    "kRelaxedOrdering": "IBV_ACCESS_RELAXED_ORDERING",
    "kRemoteRead": "IBV_ACCESS_REMOTE_READ",
    "kRemoteWrite": "IBV_ACCESS_REMOTE_WRITE",
    "kError": "IBV_QPS_ERR",
    "kReadyToSend": "IBV_QPS_RTS",
    "kReliableConnection": "IBV_QPT_RC",
    "kQpAccessFlags": "IBV_QP_ACCESS_FLAGS",
    "kQpAv": "IBV_QP_AV",
    "kQpPathMtu": "IBV_QP_PATH_MTU",
    "kQpTimeout": "IBV_QP_TIMEOUT",
    "kQpRetryCnt": "IBV_QP_RETRY_CNT",
    "kQpRnrRetry": "IBV_QP_RNR_RETRY",
    "kQpRqPsn": "IBV_QP_RQ_PSN",
    "kQpSqPsn": "IBV_QP_SQ_PSN",
    "kQpMaxQpRdAtomic": "IBV_QP_MAX_QP_RD_ATOMIC",
    "kQpMaxDestRdAtomic": "IBV_QP_MAX_DEST_RD_ATOMIC",
    "kQpMinRnrTimer": "IBV_QP_MIN_RNR_TIMER",
    "kQpDestQpn": "IBV_QP_DEST_QPN",
    "kQpPkeyIndex": "IBV_QP_PKEY_INDEX",
    "kQpPort": "IBV_QP_PORT",
    "kWrite": "IBV_WR_RDMA_WRITE",
    "kRead": "IBV_WR_RDMA_READ",
    "kWriteWithImm": "IBV_WR_RDMA_WRITE_WITH_IMM",
    "kWcRecvRdmaWithImm": "IBV_WC_RECV_RDMA_WITH_IMM",
    "kSend": "IBV_WR_SEND",
    "kSignaled": "IBV_SEND_SIGNALED",
    "kInline": "IBV_SEND_INLINE",
    "kRemAccessErr": "IBV_WC_REM_ACCESS_ERR",
    "kRemInvReqErr": "IBV_WC_REM_INV_REQ_ERR",
    "kRetryExcErr": "IBV_WC_RETRY_EXC_ERR",
    "kWrFlushErr": "IBV_WC_WR_FLUSH_ERR",
    "kLocProtErr": "IBV_WC_LOC_PROT_ERR",
    "kEventDeviceFatal": "IBV_EVENT_DEVICE_FATAL",
    "kEventPortErr": "IBV_EVENT_PORT_ERR",
    "kGidRoceV2": "IBV_GID_TYPE_ROCE_V2",
}


def members(struct: str) -> list[str]:
    """The members of one of our structs, as its text lists them."""
    text = (CORE / "ibverbs_abi.hpp").read_text()
    found = re.search(rf"^struct {struct} {{\n(.*?)^}};", text, re.S | re.M)
    assert found, struct
    body = re.sub(r"\b(?:union|struct) {.*?\n  } (\w+);", r"int \1;", found[1], flags=re.S)
    lines = [line.split("//")[0] for line in body.split(";")]
    return [name for line in lines for name in re.findall(r"(\w+)(?:\[\d+\])?\s*(?:,|$)", line.strip())]


@pytest.mark.skipif(not HEADER.exists(), reason=f"{HEADER} is not here; install libibverbs-dev")
def test_layout_and_constants_are_those_of_the_header(tmp_path: Path) -> None:
    lines = [
        "#include <infiniband/verbs.h>",
        '#include "ibverbs_abi.hpp"',
        "namespace o = mooncake::verbs::ibv;",
    ]
    for ours, theirs in (STRUCTS | BEGINNINGS).items():
        if ours in STRUCTS:
            lines.append(f'static_assert(sizeof(o::{ours}) == sizeof({theirs}), "{ours}");')
        names = members(ours)
        assert len(names) > 1, ours
        for name in names:
            if ours == "Context" and name == "ops":
                continue
            other = OTHER_NAMES.get(ours, {}).get(name, name)
            lines.append(
                f'static_assert(offsetof(o::{ours}, {name}) == offsetof({theirs}, {other}), "{ours} {name}");'
            )
    lines += [
        f"static_assert(offsetof(o::ContextOps, {name}) == offsetof(ibv_context_ops, {name}));"
        for name in OPS
    ]
    lines.append("static_assert(sizeof(o::ContextOps) == sizeof(ibv_context_ops));")
    lines += [f"static_assert(int(o::{ours}) == int({theirs}));" for ours, theirs in CONSTANTS.items()]
    source = tmp_path / "compare.cpp"
    source.write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        [*cxx(), "-std=c++20", f"-I{CORE}", "-fsyntax-only", str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
