#include "linear_layer.h"

namespace quire {

void linear_bf16(const LinearCall& call) { LinearLayer<Bf16Tile, bf16>(call).run(); }

}  // namespace quire
