// The choice of sparse attention: index scores of queries over a paged cache of index keys, and the highest of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "phases.h"
#include "products.h"

namespace dsjax {

// Letters as in docs/glossary.md: R rows, C queries of each, I index heads of width A, k chosen at most. S = Pr x G positions of a row.
struct IndexChoice {
  const float* query;        // [R, C, I, A]
  const float* weight;       // [R, C, I]
  const void* keys;          // [layers, pages, G, A]: float32, bfloat16, e4m3 with a scale for each kIndexScaled values, or packed (`widened`)
  const float* key_scale;    // [layers, pages, G, ceil(A / kIndexScaled)]
  const int32_t* positions;  // [R, C]
  const int32_t* tables;     // [R, Pr]
  const uint8_t* filled;     // [pages, G]: 0 where a cache slot holds nothing, which only the query at that position sees; null: all do
  int bytes;                 // of a value of a key; 0: packed
  long layer, pages, G, R, C, I, A, Pr, k;
  int32_t* chosen;  // [R, C, k]: positions in ascending order, then zeros
  int32_t* count;   // [R, C]: how many they are
  uint32_t* words;  // [R, C, ceil(S / 32)]: one bit for each position
  int threads;

  static constexpr long kIndexScaled = 128, kPackedScaled = 32;
  static constexpr long kPart = 512;  // positions that a thread scores at once

  size_t scratch_bytes() const { return layout(nullptr).scratch.bytes(); }

  void run(char* scratch, const Schedule& schedule) const {
    const Layout at = layout(scratch);
    const long parts = (S() + kPart - 1) / kPart;
    Phases::run(
        2, [&](int phase) { return phase == 0 ? R * C * parts : R * C; },
        [&](int phase, long item, int worker) {
          if (phase == 0) score(at, item / parts, item % parts * kPart, worker);
          if (phase == 1) choose(at, item);
        },
        threads, schedule);
  }

 private:
  static constexpr long kRows = 4 * kTileRows;  // positions whose keys are multiplied together

  struct Layout {
    const IndexChoice& of;
    Scratch scratch;
    float* scores = scratch.take<float>(of.R * of.C * of.S());
    // Of each worker: queries with heads side by side, their weights, and keys widened and multiplied.
    size_t own_bytes = (4 * ((of.A + 1 + kRows) * whole_vectors(of.I) + kRows * of.A) + 63) / 64 * 64;
    char* own = scratch.take<char>(own_bytes * std::max(of.threads, 1));
  };
  Layout layout(char* base) const { return {*this, Scratch(base)}; }

  long S() const { return Pr * G; }

  long seen(long item) const { return std::clamp<long>(positions[item] + 1l, 1, S()); }

  // A key as float32: where it lies in the cache, or widened into `own`.
  const float* key(long slot, float* own) const {
    const long at = slot * A;
    if (bytes == 4) return static_cast<const float*>(keys) + at;
    if (bytes == 0) return widened(slot, own);
    if (bytes == 2) {
      widen<BFloat16>(static_cast<const uint16_t*>(keys) + at, A, 1.0f, own);
      return own;
    }
    const float* scale = key_scale + slot * ((A + kIndexScaled - 1) / kIndexScaled);
    for (long w = 0; w < A; w += kIndexScaled)
      widen<Float8>(static_cast<const uint8_t*>(keys) + at + w, std::min(kIndexScaled, A - w), *scale++, own + w);
    return own;
  }

  // A key of A / 2 bytes with two e2m1 values each, the lower bits first, then a power-of-two scale of one byte for each kPackedScaled values.
  const float* widened(long slot, float* own) const {
    static constexpr float kValues[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    const uint8_t* from = static_cast<const uint8_t*>(keys) + slot * (A / 2 + (A + kPackedScaled - 1) / kPackedScaled);
    for (long w = 0; w < A; w++)
      own[w] = kValues[from[w / 2] >> w % 2 * 4 & 15] * bits<float>(static_cast<uint32_t>(from[A / 2 + w / kPackedScaled]) << 23);
    return own;
  }

  void score(const Layout& at, long item, long first, int worker) const {
    const long row = item / C, end = std::min(first + kPart, seen(item)), wide = whole_vectors(I);
    if (first >= end) return;
    float* heads = reinterpret_cast<float*>(at.own + at.own_bytes * worker);
    float *weights = heads + A * wide, *copies = weights + wide, *products = copies + kRows * A;
    std::fill(heads, heads + (A + 1) * wide, 0.0f);
    for (long j = 0; j < I; j++) {
      for (long w = 0; w < A; w++) heads[w * wide + j] = query[(item * I + j) * A + w];
      weights[j] = weight[item * I + j];
    }
    const float scale = 1.0f / std::sqrt(static_cast<float>(A));
    float* scores = at.scores + item * S();
    for (long s = first; s < end; s += kRows) {
      const long count = std::min(kRows, end - s);
      const float* rows[kRows];
      float* of_heads[kRows];
      for (long i = 0; i < count; i++) {
        const long slot = (layer * pages + tables[row * Pr + (s + i) / G]) * G + (s + i) % G;
        rows[i] = key(slot, copies + i * A), of_heads[i] = products + i * wide;
      }
      product(count, rows, 1, Matrix<Float32>{heads, wide}, 0, wide, A, of_heads, Sums::replace);
      for (long i = 0; i < count; i++) {
        Vec total{};
        for (long j = 0; j < wide; j += kLanes) total += larger(load(of_heads[i] + j) * scale, Vec{}) * load(weights + j);
        scores[s + i] = sum(total);
      }
    }
    if (filled)
      for (long s = first; s < end; s++)
        if (s != std::min<long>(positions[item], S() - 1) && !filled[tables[row * Pr + s / G] * G + s % G])
          scores[s] = -std::numeric_limits<float>::infinity();
  }

  // An integer in the order of the scores; 0 and -0, which are equal, give the same.
  static uint32_t ordered(float score) {
    const uint32_t all = bits<uint32_t>(score == 0 ? 0.0f : score);
    return all >> 31 ? ~all : all | 0x80000000u;
  }

  // The k-th highest of n scores, eight bits at a time, and how many of its equals are chosen.
  uint32_t threshold(const float* scores, long n, long& places) const {
    uint32_t found = 0;
    places = k;
    for (int shift = 24; shift >= 0; shift -= 8) {
      long counts[256] = {};
      const uint32_t mask = shift == 24 ? 0 : ~0u << (shift + 8);
      for (long s = 0; s < n; s++) {
        const uint32_t value = ordered(scores[s]);
        counts[value >> shift & 255] += (value & mask) == found;
      }
      uint32_t digit = 255;
      while (counts[digit] < places) places -= counts[digit--];
      found |= digit << shift;
    }
    return found;
  }

  void choose(const Layout& at, long item) const {
    const long n = seen(item), row_words = (S() + 31) / 32;
    const float* scores = at.scores + item * S();
    long places = n, taken = 0;
    const uint32_t least = n > k ? threshold(scores, n, places) : 0;
    int32_t* to = chosen + item * k;
    uint32_t* word = words + item * row_words;
    std::fill(word, word + row_words, 0u);
    for (long s = 0; s < n; s++) {
      const uint32_t value = ordered(scores[s]);
      if (value < least || (n > k && value == least && places-- <= 0)) continue;
      if (!(scores[s] > -std::numeric_limits<float>::infinity())) continue;
      to[taken++] = static_cast<int32_t>(s);
      word[s / 32] |= 1u << (s % 32);
    }
    std::fill(to + taken, to + k, 0);
    count[item] = static_cast<int32_t>(taken);
  }
};

extern template void run_kernel(const IndexChoice&, char*, const Schedule&);

}  // namespace dsjax
