#include "linear_layer.h"

namespace quire {

void linear_f32(const LinearCall& call) { LinearLayer<FloatTile, float>(call).run(); }

}  // namespace quire
