#include "wire.hpp"

namespace mooncake::verbs {
namespace {

constexpr size_t kRingBytes = 8 + 4 + 1;

}  // namespace

std::string Writer::finish() {
  auto put = [&](size_t at, uint32_t value) {
    for (size_t i = 0; i < 4; ++i) bytes_[at + i] = static_cast<char>(value >> (8 * i));
  };
  put(0, kMagic);
  put(8, static_cast<uint32_t>(bytes_.size() - kHeaderBytes));
  return std::move(bytes_);
}

std::string encode(Message kind, const Greeting& greeting) {
  Writer writer(kind);
  writer.bytes(greeting.nonce.data(), greeting.nonce.size());
  writer.bytes(greeting.session.data(), greeting.session.size());
  writer.number(greeting.generation).number(greeting.status);
  writer.number(greeting.mtu).number(greeting.rd_atomic).number(greeting.ethernet);
  writer.bytes(greeting.gid.raw, sizeof greeting.gid.raw).number(greeting.lid);
  writer.number(static_cast<uint8_t>(greeting.qps.size()));
  for (const QpAddress& qp : greeting.qps) writer.number(qp.number).number(qp.psn);
  if (greeting.status == MC_OK) {
    writer.number(greeting.ring_iova).number(greeting.ring_rkey).number(greeting.ring_slots);
  } else {
    writer.bytes(greeting.reason.data(), greeting.reason.size());
  }
  return writer.finish();
}

bool decode(std::string_view payload, Greeting& greeting) {
  Reader reader(payload);
  reader.bytes(greeting.nonce.data(), greeting.nonce.size());
  reader.bytes(greeting.session.data(), greeting.session.size());
  reader.number(&greeting.generation);
  reader.number(&greeting.status);
  reader.number(&greeting.mtu);
  reader.number(&greeting.rd_atomic);
  reader.number(&greeting.ethernet);
  reader.bytes(greeting.gid.raw, sizeof greeting.gid.raw);
  reader.number(&greeting.lid);
  uint8_t count = 0;
  reader.number(&count);
  if (count > kMaxQps) return false;
  greeting.qps.resize(count);
  for (QpAddress& qp : greeting.qps) {
    reader.number(&qp.number);
    reader.number(&qp.psn);
  }
  if (greeting.status == MC_OK && reader.left() >= kRingBytes) {
    reader.number(&greeting.ring_iova);
    reader.number(&greeting.ring_rkey);
    reader.number(&greeting.ring_slots);
  }
  greeting.reason = reader.rest();
  bool known = greeting.status >= MC_OK && greeting.status <= MC_CLOSED;
  return reader.ok() && known && greeting.rd_atomic > 0 && greeting.mtu >= 1 && greeting.mtu <= 5;
}

std::string encode(const Taken& taken) {
  Writer writer(Message::kTaken);
  return writer.number(taken.generation).number(taken.qp).number(taken.count).finish();
}

bool decode(std::string_view payload, Taken& taken) {
  Reader reader(payload);
  reader.number(&taken.generation);
  reader.number(&taken.qp);
  reader.number(&taken.count);
  return reader.ok();
}

std::string encode(const ImportRequest& request) {
  Writer writer(Message::kImport);
  writer.number(request.ask).number(request.region_id).bytes(request.key.data(), request.key.size());
  return writer.finish();
}

bool decode(std::string_view payload, ImportRequest& request) {
  Reader reader(payload);
  reader.number(&request.ask);
  reader.number(&request.region_id);
  reader.bytes(request.key.data(), request.key.size());
  return reader.ok();
}

std::string encode(const ImportAnswer& answer) {
  Writer writer(Message::kImported);
  writer.number(answer.ask).number(answer.status).number(answer.access);
  writer.number(answer.iova).number(answer.length).number(answer.chunk_shift);
  writer.number(static_cast<uint32_t>(answer.rkeys.size()));
  for (uint32_t rkey : answer.rkeys) writer.number(rkey);
  writer.bytes(answer.reason.data(), answer.reason.size());
  return writer.finish();
}

bool decode(std::string_view payload, ImportAnswer& answer) {
  Reader reader(payload);
  reader.number(&answer.ask);
  reader.number(&answer.status);
  reader.number(&answer.access);
  reader.number(&answer.iova);
  reader.number(&answer.length);
  reader.number(&answer.chunk_shift);
  uint32_t count = 0;
  reader.number(&count);
  if (!reader.ok() || count > kMaxPayload / sizeof(uint32_t)) return false;
  answer.rkeys.resize(count);
  for (uint32_t& rkey : answer.rkeys) reader.number(&rkey);
  answer.reason = reader.rest();
  if (!reader.ok() || answer.status < MC_OK || answer.status > MC_CLOSED) return false;
  if (answer.status != MC_OK) return true;
  // What is not consistent would make this side compute wrong addresses.
  if (answer.length == 0 || answer.chunk_shift < 12 || answer.chunk_shift > 63) return false;
  if (answer.iova + answer.length < answer.iova) return false;
  return ((answer.length - 1) >> answer.chunk_shift) + 1 == count;
}

}  // namespace mooncake::verbs
