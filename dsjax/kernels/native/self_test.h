// A small case of each kernel, held to a loop in double precision: does this library compute on this machine what it should?
#pragma once

#include <cmath>
#include <vector>

#include "attention.h"
#include "dense.h"
#include "experts.h"
#include "index.h"

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
  // Runs a kernel on this thread alone.
  template <class Kernel>
  static void run_here(const Kernel& kernel) {
    std::vector<char> scratch(kernel.scratch_bytes());
    run_kernel(kernel, scratch.data(), [](std::function<void()> task) { task(); });
  }
  static bool near(const std::vector<double>& expected, const std::vector<float>& found, double within) {
    bool all = true;
    for (size_t i = 0; i < expected.size(); i++) all = all && std::fabs(expected[i] - found[i]) <= within;
    return all;
  }

  bool experts() {
    const long X = 3, D = 37, F = 19, N = 9, K = 2;
    auto gate_up = values(X * D * 2 * F), down = values(X * F * D), rows = values(N * D), weights = values(N * K);
    std::vector<int32_t> ids(N * K);
    for (long p = 0; p < N * K; p++) ids[p] = static_cast<int32_t>(p * 5 % 4) - 1;
    std::vector<float> out(N * D);
    run_here(Experts{gate_up.data(), down.data(), nullptr, nullptr, 4, 0, X, D, F, rows.data(), D, ids.data(), weights.data(), N, K, out.data(),
                     1, 1, false});
    std::vector<double> expected(N * D);
    for (long p = 0; p < N * K; p++) {
      const long n = p / K, x = ids[p];
      for (long f = 0; x >= 0 && f < F; f++) {
        double gate = 0, up = 0;
        for (long d = 0; d < D; d++) {
          gate += double(rows[n * D + d]) * gate_up[((x * D + d) * 2) * F + f];
          up += double(rows[n * D + d]) * gate_up[((x * D + d) * 2 + 1) * F + f];
        }
        const double hidden = gate / (1 + std::exp(-gate)) * up * weights[p];
        for (long d = 0; d < D; d++) expected[n * D + d] += hidden * down[(x * F + f) * D + d];
      }
    }
    return near(expected, out, 1e-3);
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
    kernel.q_nope = q_nope.data(), kernel.q_rope = q_rope.data(), kernel.weights = {weights.data(), 4, 0, M, H * (N + U)};
    kernel.cache = {latent.data(), rope.data(), 4, 0, P, G};
    kernel.start = start.data(), kernel.length = length.data(), kernel.tables = tables.data(), kernel.filled = filled.data();
    kernel.R = R, kernel.C = C, kernel.H = H, kernel.N = N, kernel.O = O, kernel.U = U, kernel.M = M, kernel.Pr = Pr;
    kernel.scale = 0.3f, kernel.out = out.data(), kernel.threads = 1;
    run_here(kernel);
    std::vector<double> expected(R * C * H * U);
    for (long query = 0; query < R * C * H; query++) {
      const long r = query / (C * H), c = query / H % C, h = query % H;
      double total = 0, *sums = &expected[query * U];
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
          for (long u = 0; u < U; u++) sums[u] += weight * latent[at * M + m] * weights[(m * H + h) * (N + U) + N + u];
      }
      for (long u = 0; total && u < U; u++) sums[u] /= total;
    }
    return near(expected, out, 1e-3);
  }

  bool dense() {
    const long K = 24, width = 37, N = 19;
    auto weight = values(K * 2 * width), rows = values(N * K);
    std::vector<float> out(N * 2 * width);
    std::vector<double> expected(N * 2 * width);
    for (long i = 0; i < N * 2 * width; i++)
      for (long k = 0; k < K; k++) expected[i] += double(rows[i / (2 * width) * K + k]) * weight[k * 2 * width + i % (2 * width)];
    run_here(Dense{weight.data(), nullptr, 4, false, 0, K, 2, width, 8, rows.data(), N, out.data(), 1});
    if (!near(expected, out, 1e-4)) return false;
    const long few = 3;  // rows that are streamed
    std::fill(out.begin(), out.begin() + few * 2 * width, 0.0f);
    run_here(Dense{weight.data(), nullptr, 4, false, 0, K, 2, width, 8, rows.data(), few, out.data(), 1});
    return near(expected, out, 1e-4);
  }

  bool norm() {
    const long N = 2, width = 37;
    auto rows = values(N * width), scale = values(width);
    std::vector<float> out(N * width);
    std::vector<double> squares(N), expected(N * width);
    for (long i = 0; i < N * width; i++) squares[i / width] += double(rows[i]) * rows[i];
    for (long i = 0; i < N * width; i++) expected[i] = rows[i] / std::sqrt(squares[i / width] / width + 1e-6) * scale[i % width];
    run_here(Norm{rows.data(), scale.data(), N, width, 1e-6f, out.data(), 1});
    return near(expected, out, 1e-5);
  }

  bool index_choice() {
    const long R = 2, C = 2, I = 3, A = 16, G = 4, P = 24, Pr = 20, k = 9;
    auto query = values(R * C * I * A), weight = values(R * C * I), keys = values(P * G * A);
    // Sums of so few bits that no order of them rounds.
    for (float& value : query) value = std::round(4 * value);
    for (float& value : keys) value = std::round(4 * value);
    for (float& value : weight) value = value < 0 ? -1.0f : 2.0f;
    std::vector<int32_t> positions{70, 71, 3, 4}, tables(R * Pr), chosen(R * C * k), count(R * C);
    std::vector<uint32_t> words(R * C * 3);
    for (long i = 0; i < R * Pr; i++) tables[i] = static_cast<int32_t>(i * 7 % P);
    run_here(IndexChoice{query.data(), weight.data(), keys.data(), nullptr, positions.data(), tables.data(), nullptr, 4, 0, P, G, R, C, I, A, Pr,
                         k, chosen.data(), count.data(), words.data(), 1});
    for (long item = 0; item < R * C; item++) {
      const long n = positions[item] + 1;
      std::vector<double> scores(n);
      for (long s = 0; s < n; s++)
        for (long j = 0; j < I; j++) {
          double product = 0;
          const long at = tables[item / C * Pr + s / G] * G + s % G;
          for (long w = 0; w < A; w++) product += double(query[(item * I + j) * A + w]) * keys[at * A + w];
          scores[s] += std::max(product / 4, 0.0) * weight[item * I + j];
        }
      long taken = 0;
      for (long s = 0; s < n; s++) {
        long before = 0;  // scores that come first
        for (long other = 0; other < n; other++) before += scores[other] > scores[s] || (scores[other] == scores[s] && other < s);
        const bool expected = before < k, found = words[item * 3 + s / 32] >> (s % 32) & 1;
        if (expected != found || (expected && chosen[item * k + taken++] != s)) return false;
      }
      if (taken != count[item]) return false;
    }
    return true;
  }

  // Each code of FP8, alone and in a group, in the place of each other one.
  bool codes() {
    for (int first = 0; first < 256; first++) {
      uint8_t from[kGroupColumns];
      for (long i = 0; i < kGroupColumns; i++) from[i] = static_cast<uint8_t>(first + i);
      Vec group[kGroup];
      Float8::widen_group(from, group, Float8::Held{});
      Float8::order(group);
      for (long i = 0; i < kGroupColumns; i++) {
        const int exponent = from[i] >> 3 & 15, fraction = from[i] & 7;
        const float size = exponent ? std::ldexp(1 + fraction / 8.0f, exponent - 7) : std::ldexp(fraction / 8.0f, -6);
        const float expected = from[i] & 0x80 ? -size : size, one = Float8::widen_one(from[i]), other = group[i / kLanes][i % kLanes];
        const bool none = (from[i] & 0x7f) == 0x7f;
        for (float found : {one, other})
          if (none ? !std::isnan(found) : std::memcmp(&found, &expected, sizeof(float)) != 0) return false;
      }
    }
    return true;
  }

  // 0, or the number of the kernel that fails.
  int run() {
    if (!experts()) return 1;
    if (!attention<AbsorbedAttention>()) return 2;
    if (!attention<ExpandedAttention>()) return 3;
    if (!dense()) return 4;
    if (!norm()) return 5;
    if (!index_choice()) return 6;
    return codes() ? 0 : 7;
  }
};

}  // namespace dsjax

extern "C" int dsjax_self_test() { return dsjax::SelfTest().run(); }
