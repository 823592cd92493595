// <immintrin.h> without GCC 12's false alarms: its AVX512 intrinsics initialise their undefined operand with
// itself (GCC bug 105593), which -Wall reports in every function that inlines one. The state of the diagnostic
// where a header is read is what counts.
#pragma once

#pragma GCC diagnostic push
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
