// What adapters add to a product of rows: low_rank.cpp, also for the experts of a mixture.
#pragma once

#include "api.h"

QUIRE_API void quire_add_low_rank(int64_t dtype, int64_t in_features, int64_t out_features, const void* x,
                                  const void* adapters, const int32_t* count, const int32_t* tokens,
                                  const int32_t* numbers, void* y);
