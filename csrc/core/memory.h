// Large anonymous memory on huge pages, and which NUMA node pages come from.
#pragma once

#include <cstddef>

namespace moestro {

// `nbytes` (> 0) of zeroed memory aligned to 2 MiB, huge pages advised. Null if there is none.
std::byte* allocate_pages(size_t nbytes);
void free_pages(std::byte* p, size_t nbytes);

// Pages of [p, p + nbytes) that are first touched from now on come from this node as long as it has
// any; with node -1 from the node of the thread that touches them. p lies at the start of a page.
// 0 or an errno.
int prefer_node(std::byte* p, size_t nbytes, int node);
// The node of the page that holds p (touched now if it was not), or minus an errno.
int node_of(const std::byte* p);

}  // namespace moestro
