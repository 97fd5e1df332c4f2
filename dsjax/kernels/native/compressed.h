// DeepSeek-V4's attention over a paged cache, read in place: one vector of each token or entry is key and value of all heads. A query's
// softmax has the head's sink, the tokens of its window, and compressed entries.
#pragma once

#include <algorithm>

#include "attention.h"

namespace dsjax {

// Vectors of one layer on their pages, [layers, pages, G, *]: M values of float32, or the bytes of an FP8 entry
// (dsjax/model/compressed/precision.py): unrotated values in e4m3, a power-of-two scale of one byte for each kEntryScaled of them, padded to
// whole eights, and rotated values in bfloat16.
struct Pages {
  const void* data;
  long layer = 0, pages = 0, G = 1;
  long rotated = 0;  // how many values are rotated in FP8 entries; 0: float32

  static constexpr long kEntryScaled = 64;

  // A vector as float32: where it lies, or widened into `copy`.
  const float* at(long page, long slot, long M, float* copy) const {
    const long number = (layer * pages + page) * G + slot, plain = M - rotated;
    if (rotated == 0) return static_cast<const float*>(data) + number * M;
    const long scales = ((plain + kEntryScaled - 1) / kEntryScaled + 7) / 8 * 8;
    const uint8_t* from = static_cast<const uint8_t*>(data) + number * (plain + scales + 2 * rotated);
    const uint8_t *scale = from + plain, *last = scale + scales;
    for (long m = 0; m < plain; m += kEntryScaled) {
      const float factor = bits<float>(static_cast<uint32_t>(*scale++) << 23);
      widen<Float8>(from + m, std::min(kEntryScaled, plain - m), factor, copy + m);
    }
    for (long m = 0; m < rotated; m++) copy[plain + m] = BFloat16::widen_one(load_as<uint16_t>(last + 2 * m));
    return copy;
  }
};

// Letters as in docs/glossary.md: R rows, C queries of each, H heads of width M. Each query is computed by itself, and its context is taken
// by kBlock vectors from the window's first token on: a result depends neither on the batch, nor on the heads beside it, nor on pages.
struct CompressedAttention : ByBlocks {
  const float* query;        // [R, C, H, M]
  const float* sink;         // [H]
  const int32_t* positions;  // [R, C]: a query at -1 sees nothing, and gives zeros
  const int32_t* ring;       // [R, Pw]: position p is on window page p / G % Pw of the ring
  const int32_t* tables;     // [R, Pr]: pages of entries
  const uint8_t* filled;     // [pages, G] of the window: 0 where a slot holds nothing, which only the query at that position sees; null: all do
  const int32_t* chosen;     // [R, C, k]: entries that a query attends to, ascending; null: the first of them
  const int32_t* count;      // [R, C]: how many entries
  Pages window, entries;
  long R, C, H, M, Pw, Pr, k;
  long span;  // tokens of a window
  float scale;
  float* out;  // [R, C, H, M]
  int threads;

  size_t scratch_bytes() const { return own(nullptr).scratch.bytes() * std::max(threads, 1); }

  void run(char* scratch, const Schedule& schedule) const {
    const long parts = (H + kItemQueries - 1) / kItemQueries;
    const size_t bytes = own(nullptr).scratch.bytes();
    Phases::run(
        1, [&](int) { return R * C * parts; },
        [&](int, long item, int worker) {
          const long part = item % parts, first = H * part / parts;
          attend(item / parts, first, H * (part + 1) / parts - first, own(scratch + bytes * worker));
        },
        R * C * H * M * span < kLeastWork ? 1 : threads, schedule);
  }

 private:
  struct Own {  // a worker's working memory
    const CompressedAttention& of;
    Scratch scratch;
    long lanes = whole_vectors(std::min(of.H, kItemQueries)), most = std::max(lanes, kBlock);
    float* query = scratch.take<float>(of.M * lanes);
    float* scores = scratch.take<float>(kBlock * lanes);
    float* maximum = scratch.take<float>(lanes);
    float* total = scratch.take<float>(lanes);
    float* copies = scratch.take<float>(of.window.rotated ? kBlock * of.M : 0);
    const float** context = scratch.take<const float*>(kBlock);
    const float** weights = scratch.take<const float*>(most);
    float** results = scratch.take<float*>(most);
  };
  Own own(char* base) const { return {*this, Scratch(base)}; }

  // A query's heads [first, first + heads), which lie side by side in vectors: nothing is summed or compared across a vector.
  void attend(long item, long first, long heads, const Own& o) const {
    const long row = item / C, position = positions[item], lanes = whole_vectors(heads), at = (item * H + first) * M;
    std::fill(out + at, out + at + heads * M, 0.0f);
    if (position < 0) return;
    for (long h = 0; h < heads; h++) o.weights[h] = query + at + h * M;
    transposed(o.weights, heads, M, o.query, lanes, lanes);
    std::fill(o.maximum, o.maximum + lanes, 0.0f);
    std::copy(sink + first, sink + first + heads, o.maximum);
    std::fill(o.total, o.total + lanes, 1.0f);
    long found = 0;
    auto see = [&](const Pages& pages, long page, long slot) {
      const float* vector = pages.at(page, slot, M, o.copies + found * M);
      fetch(vector, M);
      o.context[found++] = vector;
      if (found == kBlock) fold(found, heads, lanes, out + at, o), found = 0;
    };
    for (long p = std::max(position - span + 1, 0l); p <= position; p++) {
      const long page = ring[row * Pw + p / window.G % Pw], slot = p % window.G;
      if (!filled || p == position || filled[page * window.G + slot]) see(window, page, slot);
    }
    for (long i = 0; i < count[item]; i++) {
      const long entry = chosen ? chosen[item * k + i] : i;
      see(entries, tables[row * Pr + entry / entries.G], entry % entries.G);
    }
    if (found) fold(found, heads, lanes, out + at, o);
    for (long h = 0; h < heads; h++) multiply(out + at + h * M, M, 1.0f / o.total[h]);
  }

  // The running maxima, sums and values after so many vectors more (arXiv 1805.02867).
  void fold(long found, long heads, long lanes, float* values, const Own& o) const {
    for (long i = 0; i < found; i++) o.results[i] = o.scores + i * lanes;
    product(found, o.context, 1, Matrix<Float32>{o.query, lanes}, 0, lanes, M, o.results, Sums::replace);
    for (long h = 0; h < heads; h++) o.results[h] = values + h * M, o.weights[h] = o.scores + h;
    for (long h = 0; h < lanes; h += kLanes) {
      const Vec before = load(o.maximum + h);
      Vec most = before, added{};
      for (long i = 0; i < found; i++) most = larger(most, load(o.scores + i * lanes + h) * scale);
      for (long i = 0; i < found; i++) {
        const Vec weight = exp(load(o.scores + i * lanes + h) * scale - most);
        added += weight;
        store(o.scores + i * lanes + h, weight);
      }
      const Vec shrink = exp(before - most);
      store(o.total + h, load(o.total + h) * shrink + added);
      store(o.maximum + h, most);
      for (long lane = 0; lane < kLanes && h + lane < heads; lane++)
        if (shrink[lane] != 1.0f) multiply(o.results[h + lane], M, shrink[lane]);
    }
    product(heads, o.weights, lanes, Scattered{o.context}, 0, M, found, o.results, Sums::add);
  }
};

extern template void run_kernel(const CompressedAttention&, char*, const Schedule&);

}  // namespace dsjax
