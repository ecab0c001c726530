// How an operation ends.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace mooncake::ep::pg {

enum class Code {
  kDone,         // every member contributed
  kPartial,      // done, but not with the contribution of every rank
  kEvicted,      // the others go on without this rank
  kRankFailed,   // the rank that has the data is gone
  kMismatch,     // ranks called different operations
  kTimeout,      // of messages; a collective evicts who is late
  kInterrupted,  // a signal handler raised in Python
  kInvalid,      // an argument that no rank can serve
  kSystem,       // the operating system refused something
};

struct Result {
  Code code = Code::kDone;
  std::string reason;
  std::vector<int> contributors;
  int source = -1;  // of a message
};

// Ends an operation from within; caught where operations are run.
class Stop : public std::runtime_error {
 public:
  Stop(Code code, const std::string& reason) : std::runtime_error(reason), code(code) {}
  Code code;
};

}  // namespace mooncake::ep::pg
