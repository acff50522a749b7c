// The part of the kernel's io_uring interface that is used here, from <linux/io_uring.h>
// (Linux 5.6): stated here so that it builds where the headers are older, as the wheels' are.
#pragma once

#include <cstdint>

namespace moestro::uring {

// The same numbers on every architecture we build for.
constexpr long kSetup = 425, kEnter = 426;

constexpr uint64_t kOffsetSubmissionRing = 0, kOffsetCompletionRing = 0x8000000,
                   kOffsetEntries = 0x10000000;
constexpr uint32_t kFeatureSingleMap = 1u << 0, kFeatureNoDrop = 1u << 1,
                   kFeatureCurrentPosition = 1u << 3;  // this one came with plain reads, in 5.6
constexpr uint32_t kSetupCompletionSize = 1u << 3;
constexpr uint32_t kEnterGetEvents = 1u << 0;
constexpr uint8_t kOpNop = 0, kOpRead = 22;

struct SubmissionOffsets {
  uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
  uint64_t user_address;
};

struct CompletionOffsets {
  uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, reserved;
  uint64_t user_address;
};

struct Params {
  uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, resv[3];
  SubmissionOffsets sq_off;
  CompletionOffsets cq_off;
};
static_assert(sizeof(Params) == 120);

struct Submission {
  uint8_t opcode, flags;
  uint16_t ioprio;
  int32_t fd;
  uint64_t offset, address;
  uint32_t length, rw_flags;
  uint64_t user_data;
  uint64_t rest[3];
};
static_assert(sizeof(Submission) == 64);

struct Entry {
  uint64_t user_data;
  int32_t result;
  uint32_t flags;
};
static_assert(sizeof(Entry) == 16);

}  // namespace moestro::uring
