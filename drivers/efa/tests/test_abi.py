"""The declarations of libfabric's interface agree with the header of the machine, where there is one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from fabric_double import CORE, INCLUDE

from mooncake_transfer.testing.compiling import cxx

FOLDERS = (Path("/opt/amazon/efa/include"), Path("/usr/include"))
# Ours and theirs. Those that libfabric fills or reads as a whole have its size; newer versions may be longer.
WHOLE = {
    "Fid": "fid",
    "FidOps": "fi_ops",
    "Fabric": "fid_fabric",
    "Domain": "fid_domain",
    "Memory": "fid_mr",
    "AddressTable": "fid_av",
    "Queue": "fid_cq",
    "AddressTableAttr": "fi_av_attr",
    "QueueAttr": "fi_cq_attr",
    "QueueEntry": "fi_cq_data_entry",
    "Context2": "fi_context2",
    "RemoteRange": "fi_rma_iov",
    "RmaMessage": "fi_msg_rma",
}
# Ours have room for what newer versions know.
AT_LEAST = {"MemoryAttr": "fi_mr_attr", "ErrorEntry": "fi_cq_err_entry"}
# Made by libfabric: only their beginnings matter.
BEGINNINGS = {
    "TransmitAttr": "fi_tx_attr",
    "ReceiveAttr": "fi_rx_attr",
    "EndpointAttr": "fi_ep_attr",
    "DomainAttr": "fi_domain_attr",
    "FabricAttr": "fi_fabric_attr",
    "DeviceAttr": "fi_device_attr",
    "LinkAttr": "fi_link_attr",
    "Nic": "fid_nic",
    "Info": "fi_info",
    "FabricOps": "fi_ops_fabric",
    "DomainOps": "fi_ops_domain",
    "MemoryOps": "fi_ops_mr",
    "AddressTableOps": "fi_ops_av",
    "QueueOps": "fi_ops_cq",
    "EndpointOps": "fi_ops_ep",
    "ConnectionOps": "fi_ops_cm",
    "MessageOps": "fi_ops_msg",
    "RmaOps": "fi_ops_rma",
    "Endpoint": "fid_ep",
}
CONSTANTS = {
    "kAddressUnspecified": "FI_ADDR_UNSPEC",
    "kMessages": "FI_MSG",
    "kRma": "FI_RMA",
    "kRead": "FI_READ",
    "kWrite": "FI_WRITE",
    "kReceive": "FI_RECV",
    "kSend": "FI_SEND",
    "kTransmit": "FI_TRANSMIT",
    "kRemoteRead": "FI_REMOTE_READ",
    "kRemoteWrite": "FI_REMOTE_WRITE",
    "kRemoteData": "FI_REMOTE_CQ_DATA",
    "kMore": "FI_MORE",
    "kCompletion": "FI_COMPLETION",
    "kDeliveryComplete": "FI_DELIVERY_COMPLETE",
    "kHmem": "FI_HMEM",
    "kContext2": "FI_CONTEXT2",
    "kReceiveData": "FI_RX_CQ_DATA",
    "kContext": "FI_CONTEXT",
    "kMemoryLocal": "FI_MR_LOCAL",
    "kMemoryVirtualAddress": "FI_MR_VIRT_ADDR",
    "kMemoryAllocated": "FI_MR_ALLOCATED",
    "kMemoryProviderKey": "FI_MR_PROV_KEY",
    "kMemoryHmem": "FI_MR_HMEM",
    "kReliableDatagram": "FI_EP_RDM",
    "kThreadCompletion": "FI_THREAD_COMPLETION",
    "kProgressManual": "FI_PROGRESS_MANUAL",
    "kManaged": "FI_RM_ENABLED",
    "kTable": "FI_AV_TABLE",
    "kQueueData": "FI_CQ_FORMAT_DATA",
    "kNoWait": "FI_WAIT_NONE",
    "kSystem": "FI_HMEM_SYSTEM",
    "kCuda": "FI_HMEM_CUDA",
    "kAddressEfa": "FI_ADDR_EFA",
    "kEnable": "FI_ENABLE",
    "kOptionEndpoint": "FI_OPT_ENDPOINT",
    "kTooSmall": "FI_ETOOSMALL",
    "kErrorAvailable": "FI_EAVAIL",
    "kNoKey": "FI_ENOKEY",
}
ERRORS = ("EAGAIN", "EACCES", "EPERM", "EKEYREJECTED", "ENODATA", "ENOMEM", "EHOSTUNREACH", "ENOPROTOOPT")
FUNCTIONS = ("getinfo", "dupinfo", "freeinfo", "fabric", "strerror", "version")
OWN = re.compile(r"unused|since_")


def members(struct: str) -> list[str]:
    """The members of one of our structs that libfabric has under the same name."""
    text = re.sub(r"//.*", "", (CORE / "libfabric_abi.hpp").read_text())
    found = re.search(rf"^struct {struct} {{\n(.*?)^}};", text, re.S | re.M)
    assert found, struct
    body = re.sub(r"\bunion {.*?\n  } (\w+);", r"int \1;", found[1], flags=re.S)
    names = []
    for declaration in body.split(";"):
        if function := re.search(r"\(\*(\w+)\)\(", declaration):
            names.append(function[1])
        else:
            names += re.findall(r"(\w+)(?:\[\d+\])?\s*(?:,|$)", declaration.strip())
    return [name for name in names if not OWN.match(name)]


def comparison() -> str:
    """A translation unit that compiles where all is as the header has it."""
    headers = ("fabric", "fi_cm", "fi_domain", "fi_endpoint", "fi_eq", "fi_errno", "fi_rma")
    lines = [f"#include <rdma/{name}.h>" for name in headers]
    lines += ['#include "fabric.hpp"', "namespace o = mooncake::efa::fi;"]
    for ours, theirs in (WHOLE | AT_LEAST | BEGINNINGS).items():
        names = members(ours)
        assert names, ours
        lines += [
            f'static_assert(offsetof(o::{ours}, {name}) == offsetof({theirs}, {name}), "{ours} {name}");'
            f'\nstatic_assert(sizeof(o::{ours}::{name}) == sizeof({theirs}::{name}), "{ours} {name}");'
            for name in names
        ]
    lines += [
        f'static_assert(sizeof(o::{ours}) == sizeof({theirs}), "{ours}");' for ours, theirs in WHOLE.items()
    ]
    lines += [
        f'static_assert(sizeof(o::{ours}) >= sizeof({theirs}), "{ours}");'
        for ours, theirs in AT_LEAST.items()
    ]
    lines += [
        f"static_assert(uint64_t(o::{ours}) == uint64_t({theirs}));" for ours, theirs in CONSTANTS.items()
    ]
    lines += [f"static_assert({name} == FI_{name});" for name in ERRORS]
    lines.append("static_assert(o::version(1, 17) == FI_VERSION(1, 17));")
    # Functions: as many parameters, of the same kinds.
    lines += [
        "template <class A> constexpr size_t count = 0;",
        "template <class R, class... A> constexpr size_t count<R (*)(A...)> = "
        "(1 + ... + sizeof(A)) * (1 + sizeof...(A));",
        *(
            f"static_assert(count<decltype(mooncake::efa::Api::{name})> == count<decltype(&fi_{name})>);"
            for name in FUNCTIONS
        ),
    ]
    return "\n".join(lines) + "\n"


@pytest.mark.skipif(
    not any((folder / "rdma/fabric.h").exists() for folder in FOLDERS),
    reason="rdma/fabric.h is not here; install libfabric-dev",
)
def test_layout_and_constants_are_those_of_the_header(tmp_path: Path) -> None:
    source = tmp_path / "compare.cpp"
    source.write_text(comparison())
    command = [*cxx(), "-std=c++20", *(f"-I{folder}" for folder in (*INCLUDE, *FOLDERS[:1]))]
    command += ["-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
