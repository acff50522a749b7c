// The MoE operator over experts that are read from disk when needed: same sums, same bits.
//
// Rounds: while reads are in flight, gate and up of the experts that have come are computed, in
// order of arrival and those in memory first; when none has come, down of the leading experts whose
// gate and up are done, in ascending id. Slots whose experts are finished are read into again. The
// shared experts are in memory: their gate and up go with the first round, their down comes last.
#pragma once

#include <memory>

#include "algo/moe.h"
#include "tiers/expert_cache.h"

namespace moestro {

// `args` as for make_moe, with null for the pointers of the routed experts: `cache`, which must be
// for as many, says where they are.
std::unique_ptr<Op> make_streamed_moe(const MoeArgs& args, Rows rows,
                                      std::shared_ptr<ExpertCache> cache);

}  // namespace moestro
