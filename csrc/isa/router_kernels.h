// The leaf kernel that chooses a token's experts by other rules than a plain softmax.
#pragma once

#include <cstdint>

namespace moestro {

enum class Scoring : uint8_t { kSoftmax, kSigmoid };

// How the experts of a token are chosen and weighted (see ops.contracts.Ops.route).
struct RouteRule {
  Scoring scoring;
  const float* bias;  // [experts] or null
  int experts;
  int top_k;
  int groups;
  int top_groups;
  bool normalize;
  float scale;

  int64_t work_floats() const { return 2 * int64_t{experts} + groups; }
  // FloatKernels::route does it too, without scratch.
  bool is_plain_softmax() const {
    return scoring == Scoring::kSoftmax && bias == nullptr && groups == 1 && scale == 1.0f;
  }
};

// The top_k experts in descending order of choice (ties: lower id first) and their weights. work:
// rule.work_floats(). False, with ids and weights undefined, if a logit is NaN or the largest is
// infinite.
using RouteKernel = bool (*)(const RouteRule& rule, const float* logits, int32_t* ids,
                             float* weights, float* work);

}  // namespace moestro
