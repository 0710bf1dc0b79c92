// Routing: a token's experts and their weights.
#include <algorithm>
#include <cmath>

#include "api.h"
#include "tape.h"
#include "parallel.h"
#include "simd.h"

namespace quire {
namespace {

constexpr int64_t MOST_EXPERTS = 1024;
constexpr double SCORE_NS = 8;   // per exponential
constexpr double LOOK_NS = 0.7;  // per expert compared

struct RouteCall {
  int64_t num_experts, top_k;
  bool sigmoid, renormalize;
  double scale;
  int64_t num_groups, top_groups, group_top;
  const float* bias;
};

// The first of the greatest that is not taken; NaN compares as not greater, and an expert is always found.
int64_t best_of(const float* values, const bool* taken, int64_t count) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; i++)
    if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
  return best;
}

void score(const RouteCall& call, float* scores) {
  if (call.sigmoid) {
    for (int64_t i = 0; i < call.num_experts; i++) scores[i] = 1.0f / (1.0f + std::exp(-scores[i]));
    return;
  }
  const float top = *std::max_element(scores, scores + call.num_experts);
  float total = 0;
  for (int64_t i = 0; i < call.num_experts; i++) total += scores[i] = std::exp(scores[i] - top);
  for (int64_t i = 0; i < call.num_experts; i++) scores[i] /= total;
}

// Removes the experts of all groups but the best.
void look_at_groups(const RouteCall& call, const float* choice, bool* taken) {
  const int64_t size = call.num_experts / call.num_groups;
  float merits[MOST_EXPERTS];
  bool looked_at[MOST_EXPERTS] = {};
  for (int64_t group = 0; group < call.num_groups; group++) {
    bool counted[MOST_EXPERTS] = {};
    merits[group] = 0;
    for (int64_t i = 0; i < call.group_top; i++) {
      const int64_t best = best_of(choice + group * size, counted, size);
      counted[best] = true;
      merits[group] += choice[group * size + best];
    }
  }
  for (int64_t i = 0; i < call.top_groups; i++) looked_at[best_of(merits, looked_at, call.num_groups)] = true;
  for (int64_t i = 0; i < call.num_experts; i++) taken[i] = !looked_at[i / size];
}

template <class T>
void route_row(const RouteCall& call, const T* logits, int32_t* ids, float* weights) {
  float scores[MOST_EXPERTS], choice[MOST_EXPERTS];
  bool taken[MOST_EXPERTS] = {};
  for (int64_t i = 0; i < call.num_experts; i++) scores[i] = to_float(logits[i]);
  score(call, scores);
  for (int64_t i = 0; i < call.num_experts; i++) choice[i] = scores[i] + (call.bias ? call.bias[i] : 0.0f);
  if (call.num_groups > 1) look_at_groups(call, choice, taken);
  float total = 0;
  for (int64_t k = 0; k < call.top_k; k++) {
    const int64_t best = best_of(choice, taken, call.num_experts);
    taken[best] = true;
    ids[k] = static_cast<int32_t>(best);
    total += weights[k] = scores[best];
  }
  for (int64_t k = 0; k < call.top_k; k++)
    weights[k] = (call.renormalize ? weights[k] / total : weights[k]) * static_cast<float>(call.scale);
}

template <class T>
void route(const RouteCall& call, int64_t rows, const T* logits, int32_t* ids, float* weights) {
  const double nanoseconds = rows * call.num_experts * (SCORE_NS + LOOK_NS * call.top_k);
  parallel_for(rows, grain_for(rows, nanoseconds), nanoseconds, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++)
      route_row(call, logits + row * call.num_experts, ids + row * call.top_k, weights + row * call.top_k);
  });
}

}  // namespace
}  // namespace quire

using namespace quire;

// logits [rows, num_experts], bias [num_experts] or null -> ids, weights [rows, top_k]. At most 1024 experts.
QUIRE_API void quire_route(int64_t dtype, int64_t rows, int64_t num_experts, int64_t top_k, int64_t sigmoid,
                           int64_t renormalize, double scale, int64_t num_groups, int64_t top_groups,
                           int64_t group_top, const void* logits, const float* bias, int32_t* ids, float* weights) {
  const RouteCall call{num_experts, top_k,      sigmoid != 0, renormalize != 0, scale,
                       num_groups,  top_groups, group_top,    bias};
  if (dtype == FLOAT32)
    route(call, rows, static_cast<const float*>(logits), ids, weights);
  else
    route(call, rows, static_cast<const bf16*>(logits), ids, weights);
}

QUIRE_RECORDABLE(route);
