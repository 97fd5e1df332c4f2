// A small case of each kernel, held to a loop in double precision: does this library compute on this machine what it should?
#pragma once

#include <cmath>
#include <vector>

#include "attention.h"
#include "experts.h"

namespace dsjax {

struct SelfTest {
  uint32_t state = 1;
  float next() {  // between -1 and 1, with 9 bits, so that bfloat16 would hold it nearly
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<int32_t>(state) >> 23) / 256.0f;
  }
  std::vector<float> values(long count) {
    std::vector<float> found(count);
    for (float& value : found) value = next();
    return found;
  }
  static void here(std::function<void()> task) { task(); }

  bool experts() {
    const long X = 3, D = 37, F = 19, N = 9, K = 2;
    auto gate_up = values(X * D * 2 * F), down = values(X * F * D), rows = values(N * D), weights = values(N * K);
    std::vector<int32_t> ids(N * K);
    for (long p = 0; p < N * K; p++) ids[p] = static_cast<int32_t>(p * 5 % 4) - 1;
    std::vector<float> out(N * D);
    Experts kernel{gate_up.data(), down.data(), nullptr, nullptr, 4, 0, X, D, F, rows.data(), D, ids.data(), weights.data(), N, K, out.data(), 1};
    std::vector<char> scratch(kernel.scratch_bytes());
    kernel.run(scratch.data(), here);
    for (long n = 0; n < N; n++) {
      std::vector<double> expected(D);
      for (long k = 0; k < K; k++) {
        const long x = ids[n * K + k];
        if (x < 0) continue;
        for (long f = 0; f < F; f++) {
          double gate = 0, up = 0;
          for (long d = 0; d < D; d++) {
            gate += double(rows[n * D + d]) * gate_up[((x * D + d) * 2) * F + f];
            up += double(rows[n * D + d]) * gate_up[((x * D + d) * 2 + 1) * F + f];
          }
          const double hidden = gate / (1 + std::exp(-gate)) * up * weights[n * K + k];
          for (long d = 0; d < D; d++) expected[d] += hidden * down[(x * F + f) * D + d];
        }
      }
      for (long d = 0; d < D; d++)
        if (!(std::fabs(expected[d] - out[n * D + d]) <= 1e-3)) return false;
    }
    return true;
  }

  template <class Kernel>
  bool attention() {
    const long R = 2, C = 3, H = 2, N = 9, O = 4, U = 11, M = 21, G = 4, P = 24, Pr = 20;
    auto q_nope = values(R * C * H * N), q_rope = values(R * C * H * O), weights = values(M * H * (N + U));
    auto latent = values(P * G * M), rope = values(P * G * O);
    std::vector<int32_t> start{70, 0}, length{3, 1}, tables(R * Pr);
    for (long i = 0; i < R * Pr; i++) tables[i] = static_cast<int32_t>(i * 7 % P);
    // Every fifth cache slot holds nothing.
    std::vector<uint8_t> filled(P * G);
    for (long i = 0; i < P * G; i++) filled[i] = i % 5 != 1;
    std::vector<float> out(R * C * H * U);
    Kernel kernel;
    kernel.q_nope = q_nope.data(), kernel.q_rope = q_rope.data(), kernel.weights = weights.data();
    kernel.cache = {latent.data(), rope.data(), M, O, 4, 0, P, G};
    kernel.start = start.data(), kernel.length = length.data(), kernel.tables = tables.data(), kernel.filled = filled.data();
    kernel.R = R, kernel.C = C, kernel.H = H, kernel.N = N, kernel.O = O, kernel.U = U, kernel.M = M, kernel.Pr = Pr;
    kernel.scale = 0.3f, kernel.out = out.data(), kernel.threads = 1;
    std::vector<char> scratch(kernel.scratch_bytes());
    kernel.run(scratch.data(), here);
    for (long r = 0; r < R; r++)
      for (long c = 0; c < C; c++)
        for (long h = 0; h < H; h++) {
          const long query = (r * C + c) * H + h;
          double total = 0;
          std::vector<double> expected(U);
          for (long s = 0; c < length[r] && s <= start[r] + c; s++) {
            const long at = tables[r * Pr + s / G] * G + s % G;
            if (!filled[at] && s != start[r] + c) continue;
            double score = 0;
            for (long o = 0; o < O; o++) score += double(q_rope[query * O + o]) * rope[at * O + o];
            for (long m = 0; m < M; m++)
              for (long n = 0; n < N; n++) score += double(q_nope[query * N + n]) * weights[(m * H + h) * (N + U) + n] * latent[at * M + m];
            const double weight = std::exp(score * 0.3);
            total += weight;
            for (long m = 0; m < M; m++)
              for (long u = 0; u < U; u++) expected[u] += weight * latent[at * M + m] * weights[(m * H + h) * (N + U) + N + u];
          }
          for (long u = 0; u < U; u++)
            if (!(std::fabs((total ? expected[u] / total : 0) - out[query * U + u]) <= 1e-3)) return false;
        }
    return true;
  }

  // 0, or the number of the kernel that fails.
  int run() {
    if (!experts()) return 1;
    if (!attention<AbsorbedAttention>()) return 2;
    return attention<ExpandedAttention>() ? 0 : 3;
  }
};

}  // namespace dsjax
