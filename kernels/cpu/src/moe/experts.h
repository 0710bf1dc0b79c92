// Products of experts with the rows that chose them.
#pragma once

#include <cstdint>

namespace quire {

// Rows [row, row + rows) of x and y use weight number `weight`.
struct RowGroup {
  int64_t row, rows, weight;
};

struct GroupedCall {
  int64_t rows, in_features, out_features;
  const void* x;       // [rows, in_features]
  const void* packed;  // concatenated weights, each from pack_weight
  const void* biases;  // [weights, out_features], or null
  void* y;             // [rows, out_features]
  const RowGroup* groups;
  int64_t num_groups;
};

void grouped_linear_f32(const GroupedCall& call);
void grouped_linear_bf16(const GroupedCall& call);

}  // namespace quire
