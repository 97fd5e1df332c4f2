// Which experts a token uses, and with what weights, from its scores of all experts (dsjax/model/transformer.py `ExpertRouter.choose`, to the bit).
#pragma once

#include <algorithm>
#include <limits>

#include "phases.h"
#include "simd.h"

namespace dsjax {

struct Router {
  const float* scores;  // [N, E]
  const float* bias;    // [E], added to the scores that choose and not to weights; null: none
  long N, E, K;
  // Experts are chosen from the `kept` best of so many groups; a group's score is the sum of its `best` (1 or 2) highest.
  long groups, kept, best;
  bool normalised;  // whether a token's weights are divided by their sum, in the order of the choice
  float factor;     // of the weights
  int32_t* ids;     // [N, K], the best first; of equals the lower number
  float* weights;   // [N, K]
  int threads;

  size_t scratch_bytes() const { return sizeof(float) * (whole_vectors(E) + whole_vectors(groups)) * threads; }

  // Nothing is allocated here: in a thread of the pool there would be nobody to tell that it failed.
  void run(char* scratch, const Schedule& schedule) const {
    const long rows = 64, items = (N + rows - 1) / rows, size = whole_vectors(E);
    Phases::run(
        1, [&](int) { return items; },
        [&](int, long item, int worker) {
          float* choice = reinterpret_cast<float*>(scratch) + (size + whole_vectors(groups)) * worker;
          // Behind the scores of all experts stands what is never chosen, up to a whole vector.
          std::fill(choice + E, choice + size, kTaken);
          for (long n = item * rows; n < N && n < (item + 1) * rows; n++) route(n, choice, size, choice + size);
        },
        N * E < kLeastWork / 8 ? 1 : threads, schedule);
  }

 private:
  static constexpr float kTaken = -std::numeric_limits<float>::infinity(), kLeftOut = -std::numeric_limits<float>::max();

  void route(long n, float* choice, long size, float* of_groups) const {
    const float* own = scores + n * E;
    for (long e = 0; e < E; e++) choice[e] = bias ? own[e] + bias[e] : own[e];
    if (groups > 1) leave_out(choice, of_groups);
    int32_t* id = ids + n * K;
    float *weight = weights + n * K, total = 0;
    for (long k = 0; k < K; k++) {
      id[k] = highest(choice, size);
      choice[id[k]] = kTaken;
      weight[k] = own[id[k]];
      total = k ? total + weight[k] : weight[k];
    }
    // As XLA divides: many numbers by one through its inverse, a single number as it is.
    const float sum = total + 1e-20f, inverse = 1.0f / sum;
    for (long k = 0; k < K; k++) weight[k] = (!normalised ? weight[k] : K == 1 ? weight[k] / sum : weight[k] * inverse) * factor;
  }

  // Experts of other groups than the best are chosen after all others. Of equal groups the first is the better one.
  void leave_out(float* choice, float* of_groups) const {
    const long members = E / groups;
    for (long g = 0; g < groups; g++) {
      float first = kTaken, second = kTaken;
      for (const float* score = choice + g * members; score < choice + (g + 1) * members; score++) {
        const float lower = *score < first ? *score : first;
        first = *score > first ? *score : first;
        second = lower > second ? lower : second;
      }
      of_groups[g] = best == 2 ? first + second : first;
    }
    for (long g = 0; g < groups; g++) {
      long better = 0;
      for (long other = 0; other < groups; other++) better += of_groups[other] > of_groups[g] || (of_groups[other] == of_groups[g] && other < g);
      if (better >= kept) std::fill(choice + g * members, choice + (g + 1) * members, kLeftOut);
    }
  }

  // The number of the highest value, and of equals the lower one. `size` is a multiple of kLanes.
  static int32_t highest(const float* values, long size) {
    Vec most = broadcast(kTaken);
    IntVec at{};
    for (long i = 0; i < size; i += kLanes) {
      const Vec value = load(values + i);
      at = value > most ? static_cast<int32_t>(i) - IntVec{} : at;
      most = larger(value, most);
    }
    int32_t found = at[0];
    float value = most[0];
    for (int lane = 1; lane < kLanes; lane++) {
      const bool better = most[lane] > value || (most[lane] == value && at[lane] + lane < found);
      found = better ? at[lane] + lane : found;
      value = better ? most[lane] : value;
    }
    return found;
  }
};

extern template void run_kernel(const Router&, char*, const Schedule&);

}  // namespace dsjax
