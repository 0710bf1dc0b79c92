#include "linear_layer.h"

namespace quire {

void linear_bf16(const LinearCall& call) { LinearLayer<Bf16Tile, bf16>(call).run(); }

void grouped_linear_bf16(const GroupedCall& call) {
  LinearLayer<Bf16Tile, bf16>({call.rows, call.in_features, call.out_features, call.x, call.packed, call.biases, call.y})
      .run_groups(call.groups, call.num_groups);
}

}  // namespace quire
