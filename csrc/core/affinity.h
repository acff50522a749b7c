// Which logical CPUs threads run on.
#pragma once

#include <pthread.h>

#include <vector>

namespace moestro {

// Keeps a thread on these CPUs. 0 or an errno.
int keep_on(pthread_t thread, const std::vector<int>& cpus);

// Moves the calling thread onto one of these CPUs if it runs elsewhere and its own affinity allows
// it. Where it may run afterwards is as before: it belongs to somebody else.
void move_to(const std::vector<int>& cpus);

}  // namespace moestro
