// Rows gathered by expert, two grouped products with the gate between them, and the weighted sum by token.
//
// An element's sums have the order of linear.h, a token adds up its experts in the order in which they were chosen: a
// row has the same bits in any batch.
#include "experts.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "api.h"
#include "low_rank.h"
#include "tape.h"
#include "parallel.h"
#include "simd.h"

namespace quire {
namespace {

constexpr int64_t MOST_EXPERTS = 1024;
constexpr int64_t TOKENS_AT_ONCE = 512;  // bounds the memory between the products; experts get enough rows each
constexpr double GATE_NS = 0.15, COPY_NS = 0.03, SUM_NS = 0.1;  // per element

struct ExpertsCall {
  int64_t hidden_size, intermediate_size, num_experts, top_k;
  double limit, alpha;
  const void *gate_up, *gate_up_bias, *down, *down_bias;
};

// Adapters, each with num_experts consecutive entries in either table (low_rank.cpp).
struct Additions {
  const void *gate_up, *down;
  const int32_t *count, *tokens, *numbers;  // rows with an adapter; `count` is null without adapters
};

template <class T>
QUIRE_INLINE vf gate_of(const ExpertsCall& call, vf gate, vf up) {
  if (call.limit == 0) return rounded_to<T>(gate / (1.0f + exp(-gate))) * up;
  const vf limit = splat(static_cast<float>(call.limit));
  gate = min(limit, gate), up = max(-limit, min(limit, up));
  return (up + 1.0f) * gate / (1.0f + exp(gate * static_cast<float>(-call.alpha)));
}

template <class T>
void gate_rows(const ExpertsCall& call, int64_t rows, const T* gate_up, T* out) {
  const int64_t size = call.intermediate_size;
  const double nanoseconds = GATE_NS * rows * size;
  parallel_for(rows, grain_for(rows, nanoseconds), nanoseconds, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const T *gate = gate_up + row * 2 * size, *up = gate + size;
      T* to = out + row * size;
      for (int64_t i = 0; i < size; i += W) {
        const int n = static_cast<int>(std::min<int64_t>(W, size - i));
        store_part(to + i, gate_of<T>(call, load_part(gate + i, n), load_part(up + i, n)), n);
      }
    }
  });
}

// Pairs of a token and one of its experts, ordered by expert.
struct Order {
  int64_t num_groups = 0;
  RowGroup groups[MOST_EXPERTS];
};

// place[pair]: its row among the gathered ones; -1 without an expert. Returns the number of rows.
int64_t order_pairs(const ExpertsCall& call, int64_t pairs, const int32_t* ids, int32_t* place, Order& order,
                    int64_t* load) {
  int64_t next[MOST_EXPERTS] = {};
  for (int64_t pair = 0; pair < pairs; pair++)
    if (ids[pair] >= 0) next[ids[pair]]++;
  int64_t row = 0;
  for (int64_t expert = 0; expert < call.num_experts; expert++) {
    const int64_t count = next[expert];
    if (load) load[expert] += count;
    if (count) order.groups[order.num_groups++] = {row, count, expert};
    next[expert] = row;
    row += count;
  }
  for (int64_t pair = 0; pair < pairs; pair++)
    place[pair] = ids[pair] < 0 ? -1 : static_cast<int32_t>(next[ids[pair]]++);
  return row;
}

// The gathered rows of tokens with an adapter, sorted by adapter and expert, and their entries
// in the tables.
struct AddedRows {
  std::vector<int32_t> rows, numbers;

  template <class T>
  void add(const void* table, int64_t in_features, int64_t out_features, const T* x, T* y) const {
    const int32_t count = static_cast<int32_t>(rows.size());
    quire_add_low_rank(is_bf16<T> ? BFLOAT16 : FLOAT32, in_features, out_features, x, table, &count, rows.data(),
                       numbers.data(), y);
  }
};

// Processes the tokens at [first, first + rows).
AddedRows find_added(const ExpertsCall& call, const Additions& added, int64_t first, int64_t rows, const int32_t* ids,
                     const int32_t* place) {
  std::vector<std::pair<int32_t, int32_t>> pairs;
  for (int32_t i = 0; i < (added.count ? *added.count : 0); i++) {
    const int64_t token = added.tokens[i] - first;
    if (token < 0 || token >= rows) continue;
    for (int64_t pair = token * call.top_k; pair < (token + 1) * call.top_k; pair++)
      if (place[pair] >= 0)
        pairs.emplace_back(static_cast<int32_t>(added.numbers[i] * call.num_experts + ids[pair]), place[pair]);
  }
  std::sort(pairs.begin(), pairs.end());
  AddedRows found;
  for (const auto& [number, row] : pairs) found.numbers.push_back(number), found.rows.push_back(row);
  return found;
}

template <class T>
struct Rows {
  const T* x;                // [rows, hidden_size]
  const float* weights;      // [rows, top_k]
  const T *shared, *gate;    // [rows, hidden_size], [rows, 1]; or null
  T* out;                    // [rows, hidden_size]
};

template <class T>
void gather(const ExpertsCall& call, int64_t rows, const T* x, const int32_t* place, T* gathered) {
  const int64_t size = call.hidden_size;
  const double nanoseconds = COPY_NS * rows * call.top_k * size;
  parallel_for(rows, grain_for(rows, nanoseconds), nanoseconds, [&](int64_t begin, int64_t end) {
    for (int64_t pair = begin * call.top_k; pair < end * call.top_k; pair++)
      if (place[pair] >= 0) std::memcpy(gathered + place[pair] * size, x + pair / call.top_k * size, size * sizeof(T));
  });
}

template <class T>
void add_up(const ExpertsCall& call, int64_t rows, const Rows<T>& at, const int32_t* place, const T* made) {
  const int64_t size = call.hidden_size, top_k = call.top_k;
  const double nanoseconds = SUM_NS * rows * (top_k + 1) * size;
  parallel_for(rows, grain_for(rows, nanoseconds), nanoseconds, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const vf share = at.gate ? 1.0f / (1.0f + exp(-splat(to_float(at.gate[row])))) : splat(1.0f);
      for (int64_t i = 0; i < size; i += W) {
        const int n = static_cast<int>(std::min<int64_t>(W, size - i));
        vf sum{};
        for (int64_t k = 0; k < top_k; k++) {
          if (place[row * top_k + k] < 0) continue;
          const T* from = made + place[row * top_k + k] * size + i;
          sum = fma(splat(at.weights[row * top_k + k]), load_part(from, n), sum);
        }
        if (at.shared) sum = fma(share, load_part(at.shared + row * size + i, n), sum);
        store_part(at.out + row * size + i, sum, n);
      }
    }
  });
}

template <class T>
void grouped_linear(const GroupedCall& call) {
  is_bf16<T> ? grouped_linear_bf16(call) : grouped_linear_f32(call);
}

template <class T>
void experts_of(const ExpertsCall& call, const Additions& added, int64_t first, int64_t rows, const int32_t* ids,
                const Rows<T>& at, int64_t* load) {
  const int64_t pairs = rows * call.top_k, hidden = call.hidden_size, size = call.intermediate_size;
  T* gathered = static_cast<T*>(scratch(2, pairs * ((hidden + 3 * size) * sizeof(T) + sizeof(int32_t)) + 64));
  T *gate_up = gathered + pairs * hidden, *gated = gate_up + pairs * 2 * size;
  int32_t* place = reinterpret_cast<int32_t*>(gated + pairs * size + (pairs * size & 1));
  Order order;
  const int64_t here = order_pairs(call, pairs, ids, place, order, load);
  if (here) {
    gather(call, rows, at.x, place, gathered);
    grouped_linear<T>({here, hidden, 2 * size, gathered, call.gate_up, call.gate_up_bias, gate_up, order.groups,
                       order.num_groups});
    const AddedRows adapted = find_added(call, added, first, rows, ids, place);
    adapted.add(added.gate_up, hidden, 2 * size, gathered, gate_up);
    gate_rows(call, here, gate_up, gated);
    grouped_linear<T>({here, size, hidden, gated, call.down, call.down_bias, gathered, order.groups, order.num_groups});
    adapted.add(added.down, size, hidden, gated, gathered);
  }
  add_up(call, rows, at, place, gathered);
}

template <class T>
void experts(const ExpertsCall& call, const Additions& added, int64_t rows, const int32_t* ids, const Rows<T>& all,
             int64_t* load) {
  for (int64_t row = 0; row < rows; row += TOKENS_AT_ONCE) {
    const int64_t at = row * call.hidden_size;
    const Rows<T> part{all.x + at, all.weights + row * call.top_k, all.shared ? all.shared + at : nullptr,
                       all.gate ? all.gate + row : nullptr, all.out + at};
    experts_of(call, added, row, std::min(TOKENS_AT_ONCE, rows - row), ids + row * call.top_k, part, load);
  }
}

}  // namespace
}  // namespace quire

using namespace quire;

// x, shared, out [rows, hidden_size]; ids, weights [rows, top_k]; shared_gate [rows]; load [num_experts]. gate_up, down:
// concatenated packed weights, with biases [num_experts, ..] or null; added_*: adapters of either
// product, or null, read again by a tape's replays.
QUIRE_API void quire_experts(int64_t dtype, int64_t rows, int64_t hidden_size, int64_t intermediate_size,
                             int64_t num_experts, int64_t top_k, double limit, double alpha, const void* x,
                             const int32_t* ids, const float* weights, const void* gate_up, const void* gate_up_bias,
                             const void* down, const void* down_bias, const void* shared, const void* shared_gate,
                             int64_t* load, const void* added_gate_up, const void* added_down,
                             const int32_t* added_count, const int32_t* added_tokens, const int32_t* added_numbers,
                             void* out) {
  const Additions added{added_gate_up, added_down, added_count, added_tokens, added_numbers};
  const ExpertsCall call{hidden_size, intermediate_size, num_experts, top_k,     limit,
                         alpha,       gate_up,           gate_up_bias, down, down_bias};
  if (dtype == FLOAT32)
    experts<float>(call, added, rows, ids,
                   {static_cast<const float*>(x), weights, static_cast<const float*>(shared),
                    static_cast<const float*>(shared_gate), static_cast<float*>(out)},
                   load);
  else
    experts<bf16>(call, added, rows, ids,
                  {static_cast<const bf16*>(x), weights, static_cast<const bf16*>(shared),
                   static_cast<const bf16*>(shared_gate), static_cast<bf16*>(out)},
                  load);
}

QUIRE_RECORDABLE(experts);
