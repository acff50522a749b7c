// Repacks checkpoint bytes into tiles without loss: byte shuffles, on the thread team or alone.
#pragma once

#include <cstdint>
#include <string>

#include "formats/format.h"

namespace moestro {

// Whether a checkpoint tensor type ("Q4_0", "BF16", ...) has a shuffle into the format.
bool can_repack(const std::string& format, const std::string& source_type);

// Bytes of one row of `cols` channels in the checkpoint. Throws Error(kUnsupportedFormat) if the
// type has no shuffle into the matrix's format.
int64_t source_row_nbytes(const PackedMatrix& matrix, const std::string& source_type);

// Fills out [matrix.nbytes()] from raw [rows][source_row_nbytes]. Throws Error(kCheckpoint) if a
// scale, or a float weight, is not finite; out is then undefined. Alone: in the calling thread, for
// callers that repack several matrices at once.
void repack(const PackedMatrix& matrix, const std::string& source_type, const uint8_t* raw,
            uint8_t* out, bool alone);

}  // namespace moestro
