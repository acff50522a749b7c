// Bindings of the paged cache and attention ops.
#include "bind/tensors.h"

namespace moestro {

void init_attention_ops(nb::module_&) {}

}  // namespace moestro
