#include "borrowed.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "file.hpp"
#include "nvme_namespace.hpp"

namespace mooncake::nvmeof {
namespace {

constexpr size_t kLongestUrl = 1024;

// What the first part brings: a descriptor of the file or block device, or of memory that holds the URL of a
// namespace; to another host no descriptor, but a text in the parts behind it.
enum class What : uint32_t { kFile, kUrl, kUrlText, kIdentityText };
struct Handover {
  uint64_t device_offset;
  What what;
  uint32_t reserved;
};

Status descriptor_of_url(const std::string& url, UniqueFd& fd) {
  fd.reset(memfd_create("mooncake-nvmeof-url", MFD_CLOEXEC));
  if (fd.valid() && pwrite(fd.get(), url.data(), url.size(), 0) == static_cast<ssize_t>(url.size()))
    return {};
  return system_failure(MC_IO, "cannot hand over the URL of a namespace", errno);
}

// Who may only read gets a descriptor that only reads.
Status descriptor_of_file(const Device& device, uint32_t access, UniqueFd& fd) {
  if ((access & MC_ACCESS_WRITE) == 0) {
    std::string link = "/proc/self/fd/" + std::to_string(device.buffered_fd());
    fd.reset(open(link.c_str(), O_RDONLY | O_CLOEXEC));
  } else {
    fd.reset(fcntl(device.buffered_fd(), F_DUPFD_CLOEXEC, 0));
  }
  return fd.valid() ? Status{} : system_failure(MC_IO, "cannot hand over " + device.name(), errno);
}

// What does not fit into one message follows in several.
void add_text(const std::string& text, driver::Offer& offer) {
  for (size_t at = 0; at < text.size(); at += driver::kBodyBytes) {
    driver::Offer::Part piece;
    piece.message = driver::make_message(driver::MessageKind::kPart);
    piece.message.body_length = static_cast<uint32_t>(std::min<size_t>(driver::kBodyBytes, text.size() - at));
    std::memcpy(piece.message.body, text.data() + at, piece.message.body_length);
    offer.parts.push_back(std::move(piece));
  }
}

std::string text_of(const std::vector<driver::Offer::Part>& parts) {
  std::string text;
  for (size_t i = 1; i < parts.size(); ++i) {
    size_t length = std::min<size_t>(parts[i].message.body_length, driver::kBodyBytes);
    text.append(reinterpret_cast<const char*>(parts[i].message.body), length);
  }
  return text;
}

std::string url_of(int fd) {
  std::string url(kLongestUrl, '\0');
  ssize_t length = pread(fd, url.data(), url.size(), 0);
  url.resize(length > 0 ? static_cast<size_t>(length) : 0);
  return url;
}

Status open_file(int fd, uint64_t bytes, const Options& options, std::shared_ptr<Device>& device) {
  std::shared_ptr<File> file;
  Status status = File::open(fd, bytes, options, file);
  device = std::move(file);
  return status;
}

Status open_found(const Identity& identity, uint32_t access, uint64_t bytes, const Options& options,
                  std::shared_ptr<Device>& device) {
  std::string name;
  if (Status status = find_namespace("/sys/block", identity, name); !status.ok()) return status;
  std::string path = "/dev/" + name;
  bool writes = (access & MC_ACCESS_WRITE) != 0;
  UniqueFd fd(open(path.c_str(), (writes ? O_RDWR : O_RDONLY) | O_CLOEXEC));
  if (!fd.valid()) return system_failure(MC_UNSUPPORTED, "cannot open " + path, errno);
  return open_file(fd.get(), bytes, options, device);
}

}  // namespace

Status lend(const driver::Session& peer, const driver::Owned& owned, uint32_t access, driver::Offer& offer) {
  std::shared_ptr<Region> region = static_cast<const Lent&>(owned).region.lock();
  if (!region) return failed(MC_REFUSED, "the region is being deregistered");
  const Device& device = *region->device;
  std::string text = device.url();
  Handover handover{region->device_offset, text.empty() ? What::kFile : What::kUrl, 0};
  UniqueFd fd;
  Status status;
  if (peer.peer.same_host) {
    status = text.empty() ? descriptor_of_file(device, access, fd) : descriptor_of_url(text, fd);
    text.clear();
  } else if (!text.empty()) {
    handover.what = What::kUrlText;
  } else {
    Identity identity;
    handover.what = What::kIdentityText;
    status = device.identity(identity);
    text = identity.text();
  }
  if (!status.ok()) return status;
  driver::Offer::Part part;
  part.message = driver::make_message(driver::MessageKind::kPart);
  put_body(part.message, handover);
  if (fd.valid()) part.fd = std::make_shared<const UniqueFd>(std::move(fd));
  offer.parts.push_back(std::move(part));
  add_text(text, offer);
  return {};
}

Status borrow(const Options& options, const std::shared_ptr<Io>& io, const driver::Message& grant,
              const std::vector<driver::Offer::Part>& parts, std::shared_ptr<driver::Opened>& opened) {
  Handover handover;
  bool complete = !parts.empty() && get_body(parts[0].message, handover) &&
                  handover.device_offset + grant.length >= grant.length &&
                  (handover.what >= What::kUrlText || parts[0].fd);
  if (!complete)
    return failed(MC_UNREACHABLE, "the peer hands over no file or device; it runs another version");
  const uint8_t no_key[MC_KEY_BYTES] = {};
  auto region = std::make_shared<Region>(grant.region_id, no_key, grant.length);
  region->device_offset = handover.device_offset;
  uint64_t bytes = handover.device_offset + grant.length;
  Status status = failed(MC_UNSUPPORTED, "it is of a kind that this version does not know");
  if (handover.what == What::kFile) status = open_file(parts[0].fd->get(), bytes, options, region->device);
  if (handover.what == What::kUrl)
    status = Namespace::open(url_of(parts[0].fd->get()), options, region->device);
  if (handover.what == What::kUrlText) status = Namespace::open(text_of(parts), options, region->device);
  if (handover.what == What::kIdentityText)
    status = open_found(Identity::parse(text_of(parts)), grant.access, bytes, options, region->device);
  if (!status.ok()) return failed(MC_UNSUPPORTED, "cannot open what the peer hands over: " + status.reason);
  auto made = std::make_shared<Borrowed>();
  made->io = io;
  made->region = std::move(region);
  opened = std::move(made);
  return {};
}

// Nothing moves its bytes any more; what a ring holds of the file goes first.
Borrowed::~Borrowed() {
  if (!region) return;
  io->forget(*region->device);
  region->device->close();
}

}  // namespace mooncake::nvmeof
