// Large anonymous memory on huge pages.
#pragma once

#include <cstddef>

namespace moestro {

// `nbytes` (> 0) of zeroed memory aligned to 2 MiB, huge pages advised. Null if there is none.
std::byte* allocate_pages(size_t nbytes);
void free_pages(std::byte* p, size_t nbytes);

}  // namespace moestro
