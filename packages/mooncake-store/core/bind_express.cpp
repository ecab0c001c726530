// The client's side of the express way: requests to bytes, answers from bytes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "express.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace mooncake::store {

namespace {

constexpr size_t kRowBytes = 40;

nb::bytes ask(uint8_t kind, uint64_t epoch, uint64_t client, const nb::bytes& digests,
              const std::vector<uint64_t>& ended, uint64_t id, uint64_t seen, bool replace,
              const nb::bytes& sizes, const nb::list& keys, bool summed, const nb::bytes& sums) {
  std::string bytes;
  bytes.reserve(sizeof(AskHead) + 8 * ended.size() + digests.size() + sizes.size());
  add(bytes, AskHead{.kind = static_cast<Express>(kind),
                     .flags = static_cast<uint8_t>((replace ? kReplace : 0) | (summed ? kSums : 0)),
                     .spare = 0,
                     .keys = static_cast<uint32_t>(digests.size() / kDigestBytes),
                     .ended = static_cast<uint32_t>(ended.size()),
                     .sums = static_cast<uint32_t>(sums.size() / 8),
                     .epoch = epoch,
                     .client = client,
                     .id = id,
                     .seen = seen});
  add_all(bytes, ended);
  bytes += view(digests);
  bytes += view(sizes);
  for (nb::handle key : keys) add(bytes, static_cast<uint32_t>(nb::borrow<nb::bytes>(key).size()));
  for (nb::handle key : keys) bytes += view(nb::borrow<nb::bytes>(key));
  bytes += view(sums);
  return as_bytes(bytes);
}

nb::bytes take_rows(Reader& rest) {
  return as_bytes(rest.block(kRowBytes * uint64_t{rest.number<uint32_t>()}));
}

nb::dict take_segments(Reader& rest, uint16_t count) {
  nb::dict segments;
  for (uint16_t i = 0; i < count && rest.good(); ++i) {
    auto segment = rest.number<uint64_t>();
    auto length = rest.number<uint32_t>();
    segments[nb::int_(segment)] = as_bytes(rest.block(length));
  }
  return segments;
}

nb::tuple located(Reader& rest, const AnswerHead& head) {
  nb::bytes found = as_bytes(rest.block(head.count));
  nb::bytes sizes = as_bytes(rest.block(8 * uint64_t{head.count}));
  bool summed = (head.flags & kSummed) != 0;
  nb::bytes sums = as_bytes(rest.block(summed ? 8 * uint64_t{head.count} : 0));
  nb::list replicas;
  for (uint32_t i = 0; i < head.lists && rest.good(); ++i) replicas.append(take_rows(rest));
  return nb::make_tuple(head.id, found, sizes, replicas, take_segments(rest, head.segments), sums);
}

nb::tuple reserved(Reader& rest, const AnswerHead& head) {
  nb::bytes outcomes = as_bytes(rest.block(head.count));
  nb::bytes rows = take_rows(rest);
  nb::dict segments = take_segments(rest, head.segments);
  nb::object room = nb::none();
  if ((head.flags & kRoom) != 0) {
    std::vector<uint64_t> numbers = rest.numbers<uint64_t>(5);
    if (rest.good()) room = nb::make_tuple(numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]);
  }
  return nb::make_tuple(head.id, outcomes, rows, segments, room, (head.flags & kWait) != 0);
}

nb::tuple committed(Reader& rest, const AnswerHead& head) {
  nb::bytes outcomes = as_bytes(rest.block(head.count));
  nb::list pages;
  for (uint32_t i = 0; i < head.lists && rest.good(); ++i) {
    auto first = rest.number<uint64_t>();
    auto length = rest.number<uint32_t>();
    pages.append(nb::make_tuple(first, as_bytes(rest.block(length))));
  }
  return nb::make_tuple(outcomes, pages);
}

nb::object read(const nb::bytes& answer) {
  Reader rest(view(answer));
  auto head = rest.number<AnswerHead>();
  nb::object found = nb::none();
  if (!rest.good()) return found;
  switch (head.kind) {
    case Express::kLocate:
      found = located(rest, head);
      break;
    case Express::kExist:
      found = as_bytes(rest.block(head.count));
      break;
    case Express::kRelease:
      found = nb::make_tuple((head.flags & kExpired) != 0, nb::cast(rest.numbers<uint32_t>(head.count)));
      break;
    case Express::kReserve:
      found = reserved(rest, head);
      break;
    case Express::kCommit:
      found = committed(rest, head);
      break;
    default:
      return found;
  }
  if (!rest.ended()) throw nb::value_error("the answer is not of this version of the express way");
  return found;
}

}  // namespace

void bind_express(nb::module_& m) {
  m.def("express_ask", &ask, "kind"_a, "epoch"_a, "client"_a, "digests"_a = nb::bytes("", 0),
        "ended"_a = std::vector<uint64_t>(), "id"_a = 0, "seen"_a = 0, "replace"_a = false,
        "sizes"_a = nb::bytes("", 0), "keys"_a = nb::list(), "summed"_a = false, "sums"_a = nb::bytes("", 0),
        nb::sig(
            "def express_ask(kind: int, epoch: int, client: int, digests: bytes = b'', ended: "
            "collections.abc.Sequence[int] = ..., id: int = 0, seen: int = 0, replace: bool = False, "
            "sizes: bytes = b'', keys: list[bytes] = ..., summed: bool = False, sums: bytes = b'') -> bytes"),
        "A request as core/express.hpp lays it out; kind is a number of Express there.");
  m.def(
      "express_answer", &read, "answer"_a, nb::sig("def express_answer(answer: bytes) -> typing.Any"),
      "What an answer says; None when it has to be asked the other way. Raises ValueError.\n\n"
      "Locate: lease, found, sizes, rows of each replica, descriptors, sums. Exist: found. Release: expired, "
      "broken.\n"
      "Reserve: reservation, outcomes, rows, descriptors, room or None, wait. Commit: outcomes, pages of\n"
      "records.");
}

}  // namespace mooncake::store
