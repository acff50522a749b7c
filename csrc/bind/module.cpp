// The extension module moestro._core.
#include "bind/tensors.h"

NB_MODULE(_core, m) {
  m.doc() = "Moestro's native core. Use it through moestro.native and moestro.devices.cpu.";
  moestro::init_runtime(m);
  moestro::init_float_ops(m);
  moestro::init_attention_ops(m);
  moestro::init_latent_ops(m);
  moestro::init_matrix_ops(m);
  moestro::init_tiers(m);
  moestro::init_stream(m);
  moestro::init_moe_op(m);
  moestro::init_slot_ops(m);
  moestro::init_streams(m);
  moestro::init_packing(m);
}
