#include "linear_layer.h"

namespace quire {

void linear_f32(const LinearCall& call) { LinearLayer<FloatTile, float>(call).run(); }

void grouped_linear_f32(const GroupedCall& call) {
  LinearLayer<FloatTile, float>({call.rows, call.in_features, call.out_features, call.x, call.packed, call.biases, call.y})
      .run_groups(call.groups, call.num_groups);
}

}  // namespace quire
