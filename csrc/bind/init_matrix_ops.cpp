// Bindings of the packed matrix ops.
#include "bind/tensors.h"

namespace moestro {

void init_matrix_ops(nb::module_&) {}

}  // namespace moestro
