// What the statuses of NVMe mean here.
#include <cstdio>

#include "nvme_queue.hpp"

namespace mooncake::nvmeof::nvme {
namespace {

struct KnownStatus {
  uint16_t status;  // type and code
  mc_status code;
  const char* words;
};

constexpr KnownStatus kKnown[] = {
    {0x001, MC_IO, "invalid command opcode"},
    {0x002, MC_IO, "invalid field in the command"},
    {0x004, MC_IO, "data transfer error"},
    {0x006, MC_IO, "internal error of the target"},
    {0x007, MC_IO, "the command was aborted"},
    {0x008, MC_UNREACHABLE, "the command was aborted, since its queue was deleted"},
    {0x00b, MC_REFUSED, "there is no such namespace"},
    {0x020, MC_REFUSED, "the namespace is write protected"},
    {0x080, MC_REFUSED, "blocks beyond the end of the namespace"},
    {0x081, MC_IO, "the capacity is exceeded"},
    {0x082, MC_IO, "the namespace is not ready"},
    {0x083, MC_REFUSED, "a reservation of another host stands against it"},
    {0x180, MC_UNSUPPORTED, "the target speaks another format of Connect"},
    {0x181, MC_UNREACHABLE, "the controller is busy"},
    {0x182, MC_REFUSED, "Connect: invalid parameters (is there such a subsystem?)"},
    {0x184, MC_REFUSED, "Connect: the subsystem does not admit this host (option host_nqn)"},
    {0x280, MC_IO, "write fault"},
    {0x281, MC_IO, "unrecovered read error"},
    {0x282, MC_IO, "end-to-end guard check error"},
    {0x286, MC_REFUSED, "access denied"},
    {0x287, MC_IO, "the block was deallocated or never written"},
    {0x300, MC_UNREACHABLE, "internal path error"},
    {0x301, MC_UNREACHABLE, "the path has persistently no access"},
    {0x302, MC_UNREACHABLE, "the path has no access"},
    {0x303, MC_UNREACHABLE, "the path is in transition"},
};

}  // namespace

Status meaning(uint16_t raw) {
  uint16_t status = (raw >> 1) & 0x7ff;
  if (status == 0) return {};
  char number[40];
  std::snprintf(number, sizeof number, " (NVMe status %x/%02x)", status >> 8, status & 0xff);
  for (const KnownStatus& known : kKnown) {
    if (known.status == status) return failed(known.code, std::string(known.words) + number);
  }
  return failed(MC_IO, std::string("the target reports an error") + number);
}

}  // namespace mooncake::nvmeof::nvme
