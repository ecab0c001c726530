#include "faults.hpp"

#include <signal.h>
#include <unistd.h>

namespace mooncake::ep::pg {

void FaultPlan::strike() {
  if (left_.fetch_sub(1) != 1) return;
  clear();
  kill(getpid(), action_.load() == Action::kKill ? SIGKILL : SIGSTOP);
}

}  // namespace mooncake::ep::pg
