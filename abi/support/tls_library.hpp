// The functions of OpenSSL (3 or 1.1.1) that tls.hpp needs, found in the machine's library at run time.
//
// Only functions whose C ABI is the same in both versions are used, by the prototypes below.
#pragma once

#include <dlfcn.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string>
#include <type_traits>

namespace mooncake::tls {

// What OpenSSL keeps private.
struct Ssl;
struct SslCtx;
struct SslSession;
struct Bio;

// The functions of libssl and libcrypto that are used here. Loaded once for each shared object; never
// unloaded, because OpenSSL leaves handlers for the process's exit.
struct Library {
  std::string missing;  // why it cannot be used; empty when it can

  void* (*TLS_method)() = nullptr;
  SslCtx* (*SSL_CTX_new)(void*) = nullptr;
  void (*SSL_CTX_free)(SslCtx*) = nullptr;
  long (*SSL_CTX_ctrl)(SslCtx*, int, long, void*) = nullptr;
  void (*SSL_CTX_set_verify)(SslCtx*, int, void*) = nullptr;
  void (*SSL_CTX_set_default_passwd_cb)(SslCtx*, int (*)(char*, int, int, void*)) = nullptr;
  int (*SSL_CTX_set_num_tickets)(SslCtx*, size_t) = nullptr;
  int (*SSL_CTX_load_verify_locations)(SslCtx*, const char*, const char*) = nullptr;
  int (*SSL_CTX_use_certificate_chain_file)(SslCtx*, const char*) = nullptr;
  int (*SSL_CTX_use_PrivateKey_file)(SslCtx*, const char*, int) = nullptr;
  int (*SSL_CTX_check_private_key)(SslCtx*) = nullptr;
  Ssl* (*SSL_new)(SslCtx*) = nullptr;
  void (*SSL_free)(Ssl*) = nullptr;
  long (*SSL_ctrl)(Ssl*, int, long, void*) = nullptr;
  void (*SSL_set_bio)(Ssl*, Bio*, Bio*) = nullptr;
  void (*SSL_set_accept_state)(Ssl*) = nullptr;
  void (*SSL_set_connect_state)(Ssl*) = nullptr;
  int (*SSL_set1_host)(Ssl*, const char*) = nullptr;
  void* (*SSL_get0_param)(Ssl*) = nullptr;
  int (*SSL_do_handshake)(Ssl*) = nullptr;
  int (*SSL_read)(Ssl*, void*, int) = nullptr;
  int (*SSL_write)(Ssl*, const void*, int) = nullptr;
  int (*SSL_shutdown)(Ssl*) = nullptr;
  int (*SSL_get_error)(const Ssl*, int) = nullptr;
  long (*SSL_get_verify_result)(const Ssl*) = nullptr;
  SslSession* (*SSL_get_session)(const Ssl*) = nullptr;
  void* (*SSL_SESSION_get0_peer)(SslSession*) = nullptr;
  int (*i2d_X509)(const void*, unsigned char**) = nullptr;
  int (*X509_VERIFY_PARAM_set1_ip_asc)(void*, const char*) = nullptr;
  const char* (*X509_verify_cert_error_string)(long) = nullptr;
  unsigned long (*ERR_get_error)() = nullptr;
  void (*ERR_clear_error)() = nullptr;
  const char* (*ERR_reason_error_string)(unsigned long) = nullptr;
  void* (*BIO_meth_new)(int, const char*) = nullptr;
  int (*BIO_meth_set_write)(void*, int (*)(Bio*, const char*, int)) = nullptr;
  int (*BIO_meth_set_read)(void*, int (*)(Bio*, char*, int)) = nullptr;
  int (*BIO_meth_set_ctrl)(void*, long (*)(Bio*, int, long, void*)) = nullptr;
  Bio* (*BIO_new)(void*) = nullptr;
  void (*BIO_set_init)(Bio*, int) = nullptr;
  void (*BIO_set_data)(Bio*, void*) = nullptr;
  void* (*BIO_get_data)(Bio*) = nullptr;
  void (*BIO_set_flags)(Bio*, int) = nullptr;
  void (*BIO_clear_flags)(Bio*, int) = nullptr;
  void* socket_method = nullptr;  // a BIO_METHOD over Wire

  static const Library& get() {
    static const Library library;
    return library;
  }

  // The reasons of this thread's failed OpenSSL calls, innermost first; empties its queue.
  std::string reasons() const {
    std::string text;
    while (unsigned long error = ERR_get_error()) {
      const char* reason = ERR_reason_error_string(error);
      constexpr unsigned long kSystem = 0x80000000ul;  // OpenSSL 3 puts errno below this bit
      std::string said = reason != nullptr ? reason
                         : error & kSystem ? strerror(static_cast<int>(error & ~kSystem))
                                           : "error " + std::to_string(error);
      if (text.find(said) == std::string::npos) text += (text.empty() ? "" : ", ") + said;
    }
    return text.empty() ? "unknown error" : text;
  }

 private:
  Library();
};

// A session's socket as OpenSSL sees it. An own one, because OpenSSL's write(2) would raise SIGPIPE.
struct Wire {
  int fd;
  bool ended = false;  // the peer closed
  int error = 0;       // errno of the last failure other than "try again"
  bool begun = false;  // something was read
  bool plain = false;  // and it was no TLS

  static constexpr int kRetryFlags = 0x0f, kRetryRead = 0x09, kRetryWrite = 0x0a;
  static constexpr int kCtrlEof = 2, kCtrlFlush = 11;

  static Wire* of(Bio* bio) { return static_cast<Wire*>(Library::get().BIO_get_data(bio)); }
  static int finish(Bio* bio, ssize_t n, int retry) {
    const Library& ssl = Library::get();
    ssl.BIO_clear_flags(bio, kRetryFlags);
    if (n >= 0) return static_cast<int>(n);
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) {
      ssl.BIO_set_flags(bio, retry);
    } else {
      of(bio)->error = errno;
    }
    return -1;
  }
  static int write(Bio* bio, const char* data, int length) {
    return finish(bio, ::send(of(bio)->fd, data, static_cast<size_t>(length), MSG_NOSIGNAL), kRetryWrite);
  }
  static int read(Bio* bio, char* data, int length) {
    ssize_t n = ::recv(of(bio)->fd, data, static_cast<size_t>(length), 0);
    Wire* wire = of(bio);
    if (n == 0) wire->ended = true;
    if (n > 0 && !wire->begun) {
      constexpr char kAlert = 0x15, kHandshake = 0x16, kMajor = 3;
      wire->begun = true;
      wire->plain = (data[0] != kAlert && data[0] != kHandshake) || (n > 1 && data[1] != kMajor);
    }
    return finish(bio, n, kRetryRead);
  }
  static long ctrl(Bio* bio, int command, long, void*) {
    if (command == kCtrlFlush) return 1;
    return command == kCtrlEof && of(bio)->ended ? 1 : 0;
  }
};

inline Library::Library() {
  void* handle = nullptr;
  for (const char* name : {"libssl.so.3", "libssl.so.1.1"}) {
    if (handle == nullptr) handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  if (handle == nullptr) {
    missing = "neither libssl.so.3 nor libssl.so.1.1 can be loaded; install OpenSSL (Debian: libssl3)";
    return;
  }
  // dlsym() also looks into libcrypto, on which libssl depends.
  auto bind = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (function == nullptr && missing.empty()) missing = std::string("the OpenSSL found here lacks ") + name;
  };
#define MC_TLS_BIND(name) bind(name, #name)
  MC_TLS_BIND(TLS_method), MC_TLS_BIND(SSL_CTX_new), MC_TLS_BIND(SSL_CTX_free), MC_TLS_BIND(SSL_CTX_ctrl);
  MC_TLS_BIND(SSL_CTX_set_verify), MC_TLS_BIND(SSL_CTX_set_default_passwd_cb);
  MC_TLS_BIND(SSL_CTX_set_num_tickets), MC_TLS_BIND(SSL_CTX_load_verify_locations);
  MC_TLS_BIND(SSL_CTX_use_certificate_chain_file), MC_TLS_BIND(SSL_CTX_use_PrivateKey_file);
  MC_TLS_BIND(SSL_CTX_check_private_key), MC_TLS_BIND(SSL_new), MC_TLS_BIND(SSL_free), MC_TLS_BIND(SSL_ctrl);
  MC_TLS_BIND(SSL_set_bio), MC_TLS_BIND(SSL_set_accept_state), MC_TLS_BIND(SSL_set_connect_state);
  MC_TLS_BIND(SSL_set1_host), MC_TLS_BIND(SSL_get0_param), MC_TLS_BIND(SSL_do_handshake);
  MC_TLS_BIND(SSL_read), MC_TLS_BIND(SSL_write), MC_TLS_BIND(SSL_shutdown), MC_TLS_BIND(SSL_get_error);
  MC_TLS_BIND(SSL_get_session), MC_TLS_BIND(SSL_SESSION_get0_peer), MC_TLS_BIND(i2d_X509);
  MC_TLS_BIND(SSL_get_verify_result), MC_TLS_BIND(X509_VERIFY_PARAM_set1_ip_asc);
  MC_TLS_BIND(X509_verify_cert_error_string), MC_TLS_BIND(ERR_get_error), MC_TLS_BIND(ERR_clear_error);
  MC_TLS_BIND(ERR_reason_error_string), MC_TLS_BIND(BIO_meth_new), MC_TLS_BIND(BIO_meth_set_write);
  MC_TLS_BIND(BIO_meth_set_read), MC_TLS_BIND(BIO_meth_set_ctrl), MC_TLS_BIND(BIO_new);
  MC_TLS_BIND(BIO_set_init), MC_TLS_BIND(BIO_set_data), MC_TLS_BIND(BIO_get_data);
  MC_TLS_BIND(BIO_set_flags), MC_TLS_BIND(BIO_clear_flags);
#undef MC_TLS_BIND
  if (!missing.empty()) return;
  constexpr int kSourceSink = 0x0400;  // BIO_TYPE_SOURCE_SINK
  socket_method = BIO_meth_new(kSourceSink, "mooncake socket");
  BIO_meth_set_write(socket_method, &Wire::write);
  BIO_meth_set_read(socket_method, &Wire::read);
  BIO_meth_set_ctrl(socket_method, &Wire::ctrl);
}

}  // namespace mooncake::tls
