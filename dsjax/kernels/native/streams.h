// Hyper-connections (DeepSeek-V4's report, section 2.2): n streams of a token, which its own values weigh and mix.
#pragma once

#include <algorithm>

#include "phases.h"
#include "products.h"

namespace dsjax {

// to[d] = sum over j < n of weights[j * step] * streams[j][d], in turn.
inline void weigh(long n, long D, const float* streams, const float* weights, long step, float* to) {
  for (long j = 0; j < n; j++)
    for (long d = 0; d < D; d++) to[d] = j == 0 ? weights[0] * streams[d] : __builtin_fmaf(weights[j * step], streams[j * D + d], to[d]);
}

// What a block reads of the streams, and how its result is spread over them and they are mixed; or, with n weights alone, what leaves them.
struct Streams {
  const float* x;       // [N, n, D]
  const float* weight;  // [n D, w], w = (2 + n) n, or n
  const float* base;    // [w]
  const float* factor;  // [3], or [1]: of the weights for reading, spreading and mixing
  long N, n, D, w;
  long rounds;           // that make a matrix doubly stochastic (Sinkhorn and Knopp)
  float norm_eps, eps;  // of the norm of all streams, and what each divisor is raised by
  float* read;           // [N, D]
  float *spread = nullptr, *mixing = nullptr;  // [N, n], [N, n, n]: row j has what each stream gets of stream j
  int threads;

  static constexpr long kTokens = 16;  // that are projected together

  size_t scratch_bytes() const { return own_floats() * sizeof(float) * std::max(threads, 1); }

  void run(char* scratch, const Schedule& schedule) const {
    Phases::run(
        1, [&](int) { return (N + kTokens - 1) / kTokens; },
        [&](int, long item, int worker) {
          const long first = item * kTokens;
          some(first, std::min(kTokens, N - first), reinterpret_cast<float*>(scratch) + worker * own_floats());
        },
        N * n * D * w < kLeastWork ? 1 : threads, schedule);
  }

 private:
  long own_floats() const { return (Panels::floats(kTokens, true) + kTokens * (n * D + w) + 15) / 16 * 16; }

  static float sigmoid(float value) { return 1.0f / (1.0f + exp(broadcast(-value))[0]); }

  void some(long first, long count, float* own) const {
    float *normed = own + Panels::floats(kTokens, true), *weights = normed + kTokens * n * D;
    const float* a[kTokens];
    float* c[kTokens];
    for (long i = 0; i < count; i++) {
      const float *streams = x + (first + i) * n * D, inverse = inverse_rms(streams, n * D, norm_eps);
      float* own_normed = normed + i * n * D;
      for (long d = 0; d < n * D; d++) own_normed[d] = streams[d] * inverse;
      a[i] = own_normed, c[i] = weights + i * w;
    }
    panel_product(own, kTokens, count, a, Matrix<Float32>{weight, w}, 0, w, n * D, c, 0, n * D);
    for (long i = 0; i < count; i++) {
      const float* streams = x + (first + i) * n * D;
      for (long j = 0; j < n; j++) c[i][j] = sigmoid(c[i][j] * factor[0] + base[j]) + eps;
      weigh(n, D, streams, c[i], 1, read + (first + i) * D);
      if (w == n) continue;
      for (long j = 0; j < n; j++) spread[(first + i) * n + j] = 2 * sigmoid(c[i][n + j] * factor[1] + base[n + j]);
      balance(c[i] + 2 * n, mixing + (first + i) * n * n);
    }
  }

  void balance(const float* weights, float* square) const {
    for (long j = 0; j < n; j++) {
      float* row = square + j * n;
      for (long k = 0; k < n; k++) row[k] = weights[j * n + k] * factor[2] + base[(2 + j) * n + k];
      const float most = *std::max_element(row, row + n);
      for (long k = 0; k < n; k++) row[k] = exp(broadcast(row[k] - most))[0];
      divide(row, 1, 0.0f);
      for (long k = 0; k < n; k++) row[k] += eps;
    }
    for (long round = 0; round < rounds; round++) {
      for (long j = 0; round > 0 && j < n; j++) divide(square + j * n, 1, eps);
      for (long k = 0; k < n; k++) divide(square + k, n, eps);
    }
  }

  // n numbers, `step` apart, by their sum and `more`.
  void divide(float* values, long step, float more) const {
    float total = 0;
    for (long i = 0; i < n; i++) total += values[i * step];
    for (long i = 0; i < n; i++) values[i * step] /= total + more;
  }
};

// The streams after a block: out[k] = spread[k] * y + sum over j of mixing[j][k] * x[j].
struct StreamsAfter {
  const float *x, *spread, *mixing, *y;  // [N, n, D], [N, n], [N, n, n], [N, D]
  long N, n, D;
  float* out;  // [N, n, D]
  int threads;

  size_t scratch_bytes() const { return 64; }

  void run(char*, const Schedule& schedule) const {
    Phases::run(
        1, [&](int) { return N; }, [&](int, long token, int) { mix(token); }, N * n * n * D < kLeastWork ? 1 : threads, schedule);
  }

 private:
  void mix(long token) const {
    const float *from = x + token * n * D, *weights = mixing + token * n * n, *result = y + token * D;
    for (long k = 0; k < n; k++) {
      float* to = out + (token * n + k) * D;
      weigh(n, D, from, weights + k, n, to);
      for (long d = 0; d < D; d++) to[d] = __builtin_fmaf(spread[token * n + k], result[d], to[d]);
    }
  }
};

extern template void run_kernel(const Streams&, char*, const Schedule&);
extern template void run_kernel(const StreamsAfter&, char*, const Schedule&);

}  // namespace dsjax
