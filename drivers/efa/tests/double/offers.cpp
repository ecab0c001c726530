// What the double says that it has: two devices, on fabric efa-direct, on fabric efa, or on both.
#include <cstdlib>
#include <cstring>
#include <string>

#include "double.hpp"

using namespace fabric_double;

extern "C" fi::Info* fi_dupinfo(const fi::Info* from);

namespace {

constexpr int kNeedsOfEfa = fi::kMemoryVirtualAddress | fi::kMemoryAllocated | fi::kMemoryProviderKey;
constexpr int kNeedsOfDirect = kNeedsOfEfa | fi::kMemoryLocal;

fi::Info* describe(const char* domain, const fi::Info& hints, const char* fabric, int needs) {
  fi::Info* info = fi_dupinfo(nullptr);
  info->caps = fi::kMessages | fi::kRma | (hints.caps & fi::kHmem);
  info->mode = fi::kContext2;
  info->addr_format = fi::kAddressEfa;
  info->ep_attr->type = fi::kReliableDatagram;
  info->ep_attr->max_msg_size = kMaxBytes;
  info->tx_attr->size = kTransmitSize;
  info->rx_attr->size = kReceiveSize;
  info->domain_attr->mr_mode = needs;
  info->domain_attr->mr_key_size = 4;
  info->domain_attr->cq_data_size = 4;
  info->domain_attr->threading = hints.domain_attr->threading;
  info->domain_attr->name = strdup(domain);
  info->fabric_attr->name = strdup(fabric);
  info->fabric_attr->prov_name = strdup("efa");
  return info;
}

// No memory of GPUs, no FI_DELIVERY_COMPLETE; contexts and registered local memory required.
bool suits_direct(const fi::Info& hints) {
  return (hints.caps & fi::kHmem) == 0 && (hints.tx_attr->op_flags & fi::kDeliveryComplete) == 0 &&
         (hints.domain_attr->mr_mode & kNeedsOfDirect) == kNeedsOfDirect;
}

// Main memory is copied where it is not registered; memory of GPUs has to be.
bool suits_efa(const fi::Info& hints) {
  int needs = kNeedsOfEfa | ((hints.caps & fi::kHmem) != 0 ? fi::kMemoryHmem : 0);
  return (hints.domain_attr->mr_mode & needs) == needs;
}

}  // namespace

// Of both, an older program that names no fabric gets efa.
extern "C" __attribute__((visibility("default"))) int fi_getinfo(uint32_t, const char*, const char*, uint64_t,
                                                                 const fi::Info* hints, fi::Info** found) {
  if (std::strcmp(hints->fabric_attr->prov_name, "efa") != 0 || (hints->mode & fi::kContext2) == 0)
    return -ENODATA;
  std::string wanted = hints->fabric_attr->name == nullptr ? "" : hints->fabric_attr->name;
  int offers = Network::get().offers;
  bool efa = (offers & kOfferEfa) != 0 && (wanted.empty() || wanted == "efa") && suits_efa(*hints);
  bool direct =
      (offers & kOfferDirect) != 0 && (wanted.empty() || wanted == "efa-direct") && suits_direct(*hints);
  if (!efa && !direct) return -ENODATA;
  int needs = !efa                             ? kNeedsOfDirect
              : (hints->caps & fi::kHmem) != 0 ? kNeedsOfEfa | fi::kMemoryHmem
                                               : kNeedsOfEfa;
  *found = nullptr;
  for (const char* domain : {"double1-rdm", "double0-rdm"}) {
    fi::Info* info = describe(domain, *hints, efa ? "efa" : "efa-direct", needs);
    info->next = *found;
    *found = info;
  }
  return 0;
}
