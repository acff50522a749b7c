// Everything an isa/*.cpp needs that must be compiled for the baseline machine: it is included
// before the target region opens, so that no inline function of it is built with newer instructions
// and then kept by the linker for everybody.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/half.h"
#include "isa/table.h"
