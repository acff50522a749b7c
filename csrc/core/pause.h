// The instruction that tells a processor that a thread spins.
#pragma once

namespace moestro {

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

}  // namespace moestro
