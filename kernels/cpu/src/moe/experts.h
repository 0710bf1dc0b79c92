// The products of experts, each with the rows that chose it.
#pragma once

#include <cstdint>

namespace quire {

// Rows [row, row + rows) of x and y meet weight number `weight`.
struct RowGroup {
  int64_t row, rows, weight;
};

struct GroupedCall {
  int64_t rows, in_features, out_features;
  const void* x;       // [rows, in_features]
  const void* packed;  // weights one after the other, each as pack_weight makes it
  const void* biases;  // [weights, out_features], or null
  void* y;             // [rows, out_features]
  const RowGroup* groups;
  int64_t num_groups;
};

void grouped_linear_f32(const GroupedCall& call);
void grouped_linear_bf16(const GroupedCall& call);

}  // namespace quire
