// TLS 1.3 with mutual authentication over non-blocking sockets, by the OpenSSL of the machine.
//
// OpenSSL is loaded when the first Context is made, so neither building nor importing needs it.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "tls_library.hpp"

namespace mooncake::tls {

// PEM files. The certificate is shown to both clients and servers, so it must be good for both.
struct Files {
  std::string ca, certificate, key;
};

// Who this side is and whom it believes. Immutable once made; any number of threads may make sessions of it.
class Context {
 public:
  // Gives nothing and a reason when OpenSSL is absent or a file does not do.
  static std::shared_ptr<const Context> make(const Files& files, std::string* reason) {
    const Library& ssl = Library::get();
    if (!ssl.missing.empty()) return *reason = ssl.missing, nullptr;
    constexpr int kModes = 33, kReadAhead = 41, kMinVersion = 123, kTls13 = 0x0304;
    constexpr int kPartialWrite = 1, kMovingBuffer = 2, kReleaseBuffers = 0x10;
    constexpr int kVerifyPeer = 1, kFailIfNone = 2, kPem = 1;
    ssl.ERR_clear_error();
    std::shared_ptr<Context> made(new Context(ssl.SSL_CTX_new(ssl.TLS_method())));
    SslCtx* ctx = made->ctx_;
    auto failed = [&](const std::string& what) { return *reason = what + ": " + ssl.reasons(), nullptr; };
    if (ctx == nullptr || ssl.SSL_CTX_ctrl(ctx, kMinVersion, kTls13, nullptr) != 1)
      return failed("no TLS 1.3");
    ssl.SSL_CTX_ctrl(ctx, kModes, kPartialWrite | kMovingBuffer | kReleaseBuffers, nullptr);
    ssl.SSL_CTX_ctrl(ctx, kReadAhead, 1, nullptr);
    ssl.SSL_CTX_set_verify(ctx, kVerifyPeer | kFailIfNone, nullptr);
    // No resumption: every session proves both certificates, and the server has nothing to send unasked.
    ssl.SSL_CTX_set_num_tickets(ctx, 0);
    // A key with a pass phrase fails here instead of asking on the terminal.
    ssl.SSL_CTX_set_default_passwd_cb(ctx, [](char*, int, int, void*) { return -1; });
    if (ssl.SSL_CTX_load_verify_locations(ctx, files.ca.c_str(), nullptr) != 1)
      return failed("no CA certificates in '" + files.ca + "'");
    if (ssl.SSL_CTX_use_certificate_chain_file(ctx, files.certificate.c_str()) != 1)
      return failed("no certificate in '" + files.certificate + "'");
    if (ssl.SSL_CTX_use_PrivateKey_file(ctx, files.key.c_str(), kPem) != 1)
      return failed("no private key that belongs to '" + files.certificate + "' in '" + files.key +
                    "' (PEM, without pass phrase)");
    if (ssl.SSL_CTX_check_private_key(ctx) != 1)
      return failed("the key '" + files.key + "' does not belong to '" + files.certificate + "'");
    return made;
  }

  ~Context() {
    if (ctx_ != nullptr) Library::get().SSL_CTX_free(ctx_);
  }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

 private:
  friend class Session;
  explicit Context(SslCtx* ctx) : ctx_(ctx) {}
  SslCtx* ctx_;
};

enum class Outcome { kDone, kWantRead, kWantWrite, kClosed, kFailed };

// One encrypted connection over a non-blocking socket, which it does not own. One thread at a time.
class Session {
 public:
  // The accepting side asks for a certificate of the CA; the connecting side also checks that the certificate
  // is for `host` (a name or an address as text; empty: any of the CA).
  static Session accept(const Context& context, int fd) { return Session(context, fd); }
  static Session connect(const Context& context, int fd, const std::string& host) {
    Session session(context, fd);
    const Library& ssl = Library::get();
    Ssl* raw = session.ssl_.get();
    if (raw == nullptr) return session;
    ssl.SSL_set_connect_state(raw);
    if (host.empty()) return session;
    if (ssl.X509_VERIFY_PARAM_set1_ip_asc(ssl.SSL_get0_param(raw), host.c_str()) != 1) {
      constexpr int kServerName = 55;
      ssl.SSL_set1_host(raw, host.c_str());
      ssl.SSL_ctrl(raw, kServerName, 0, const_cast<char*>(host.c_str()));
    }
    ssl.ERR_clear_error();
    return session;
  }

  // Each advances as far as the socket lets it. After kWantRead/kWantWrite call the same again once the
  // socket is ready for that. `read` leaves decrypted bytes in the session that poll(2) does not see: read
  // until kWantRead. kClosed and kFailed are final; reason() then tells why.
  Outcome handshake() {
    return run([&](const Library& l) { return l.SSL_do_handshake(ssl_.get()); });
  }
  Outcome read(void* data, size_t capacity, size_t* bytes) {
    int n = 0;
    Outcome outcome =
        run([&](const Library& l) { return n = l.SSL_read(ssl_.get(), data, bounded(capacity)); });
    *bytes = n > 0 ? static_cast<size_t>(n) : 0;
    return outcome;
  }
  // Takes what fits; may take less than `length` (which must not be 0) and still be done.
  Outcome write(const void* data, size_t length, size_t* bytes) {
    int n = 0;
    Outcome outcome =
        run([&](const Library& l) { return n = l.SSL_write(ssl_.get(), data, bounded(length)); });
    *bytes = n > 0 ? static_cast<size_t>(n) : 0;
    return outcome;
  }
  // Tells the peer that nothing more follows; does not wait and does not fail.
  void say_goodbye() {
    if (!broken_ && ssl_ != nullptr)
      run([&](const Library& l) { return l.SSL_shutdown(ssl_.get()) < 0 ? -1 : 1; });
  }
  // The certificate that the peer has shown and that was verified, as DER; empty before the handshake is
  // done.
  std::string peer_certificate() const {
    const Library& ssl = Library::get();
    SslSession* session = ssl_ != nullptr ? ssl.SSL_get_session(ssl_.get()) : nullptr;
    void* certificate = session != nullptr ? ssl.SSL_SESSION_get0_peer(session) : nullptr;
    int length = certificate != nullptr ? ssl.i2d_X509(certificate, nullptr) : 0;
    if (length <= 0) return {};
    std::string der(static_cast<size_t>(length), '\0');
    auto* end = reinterpret_cast<unsigned char*>(der.data());
    return ssl.i2d_X509(certificate, &end) == length ? der : std::string();
  }
  const std::string& reason() const { return reason_; }
  // Whether the network failed, rather than the peer's certificate or its TLS.
  bool is_socket_error() const { return wire_->error != 0; }
  // Whether the peer answered with something that is no TLS at all.
  bool meets_plain() const { return wire_->plain; }

 private:
  struct Free {
    void operator()(Ssl* ssl) const { Library::get().SSL_free(ssl); }
  };

  Session(const Context& context, int fd) : wire_(new Wire{fd}) {
    const Library& ssl = Library::get();
    ssl_.reset(ssl.SSL_new(context.ctx_));
    Bio* bio = ssl_ != nullptr ? ssl.BIO_new(ssl.socket_method) : nullptr;
    if (bio == nullptr) {
      ssl_.reset();
      return;
    }
    ssl.BIO_set_data(bio, wire_.get());
    ssl.BIO_set_init(bio, 1);
    ssl.SSL_set_bio(ssl_.get(), bio, bio);  // the session frees it
    ssl.SSL_set_accept_state(ssl_.get());
  }

  static int bounded(size_t n) { return n > (1u << 30) ? 1 << 30 : static_cast<int>(n); }

  template <typename Step>
  Outcome run(Step&& step) {
    constexpr int kSsl = 1, kWantRead = 2, kWantWrite = 3, kSyscall = 5, kZeroReturn = 6;
    const Library& ssl = Library::get();
    if (broken_ || ssl_ == nullptr) {
      if (!broken_) reason_ = "out of memory";
      return Outcome::kFailed;
    }
    ssl.ERR_clear_error();
    int rc = step(ssl);
    if (rc > 0) return Outcome::kDone;
    int error = ssl.SSL_get_error(ssl_.get(), rc);
    if (error == kWantRead) return Outcome::kWantRead;
    if (error == kWantWrite) return Outcome::kWantWrite;
    if (error == kZeroReturn) return reason_ = "the peer closed the connection", Outcome::kClosed;
    broken_ = error == kSsl || error == kSyscall;
    if (wire_->ended) return reason_ = "the peer closed the connection", Outcome::kClosed;
    reason_ = wire_->error != 0 ? strerror(wire_->error) : "TLS: " + ssl.reasons();
    if (long verify = ssl.SSL_get_verify_result(ssl_.get()))
      reason_ += std::string(" (") + ssl.X509_verify_cert_error_string(verify) + ")";
    return Outcome::kFailed;
  }

  std::unique_ptr<Wire> wire_;  // outlives ssl_, which uses it; its address does not change
  std::unique_ptr<Ssl, Free> ssl_;
  std::string reason_;
  bool broken_ = false;
};

}  // namespace mooncake::tls
