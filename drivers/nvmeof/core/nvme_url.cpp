#include "nvme_url.hpp"

#include <charconv>
#include <string_view>

namespace mooncake::nvmeof::nvme {
namespace {

bool number(std::string_view text, uint32_t* value) {
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc{} && end == text.data() + text.size();
}

}  // namespace

Status parse_url(const std::string& text, Url& url) {
  auto wrong = [&](const char* why) {
    return failed(MC_INVALID,
                  "'" + text + "' names no namespace: " + why +
                      "; it must be like nvme-tcp://192.0.2.1:4420/nqn.2014-08.org.example:x?nsid=1");
  };
  std::string_view rest = text;
  if (!rest.starts_with(Url::kScheme)) return wrong("it does not begin with nvme-tcp://");
  rest.remove_prefix(std::string_view(Url::kScheme).size());
  size_t slash = rest.find('/');
  if (slash == std::string_view::npos) return wrong("there is no / before the subsystem's name");
  std::string_view place = rest.substr(0, slash);
  rest.remove_prefix(slash + 1);
  size_t colon = place.rfind(':');
  if (place.starts_with('[')) {  // an IPv6 address
    size_t end = place.find(']');
    if (end == std::string_view::npos) return wrong("the address has no ]");
    url.host = place.substr(1, end - 1);
    colon = end + 1 < place.size() && place[end + 1] == ':' ? end + 1 : std::string_view::npos;
  } else {
    url.host = place.substr(0, colon);
  }
  uint32_t port = 4420;
  if (colon != std::string_view::npos &&
      (!number(place.substr(colon + 1), &port) || port == 0 || port > 65535))
    return wrong("the port is no number from 1 to 65535");
  url.port = std::to_string(port);
  if (url.host.empty()) return wrong("there is no host");
  size_t question = rest.find('?');
  url.nqn = rest.substr(0, question);
  if (url.nqn.empty() || url.nqn.size() > 223) return wrong("the subsystem's name has 1 to 223 letters");
  while (question != std::string_view::npos) {
    rest.remove_prefix(question + 1);
    question = rest.find('&');
    std::string_view item = rest.substr(0, question);
    bool known = item.starts_with("nsid=")    ? number(item.substr(5), &url.nsid) && url.nsid != 0
                 : item.starts_with("block=") ? number(item.substr(6), &url.block_bytes)
                 : item.starts_with("most=")  ? number(item.substr(5), &url.most_bytes)
                                              : false;
    if (!known) return wrong("behind the ? are nsid=NUMBER, block=BYTES and most=BYTES");
  }
  return {};
}

}  // namespace mooncake::nvmeof::nvme
