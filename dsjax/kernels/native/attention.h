// Causal MLA attention of rows of queries over the paged cache, read in place: absorbed (decode), and expanded (prompts, and caches that hold
// keys and values of each head).
#pragma once

#include <algorithm>

#include "phases.h"
#include "products.h"

namespace dsjax {

constexpr long kBlock = 64;          // context positions taken at once
constexpr float kUnseen = -3e38f;    // the score of a position that a query does not see
constexpr long kItemQueries = 48;    // queries (tokens x heads) that share a block's transposed context

// The cache of all layers, [layers, pages, G, *]: of each position a latent [M] and a rotary key [O]; both float32, both bfloat16, or
// the latent e4m3 with a scale for each kScaled of its values ([ceil(M / kScaled)]) and the rotary key bfloat16. Or, `by_head`, keys
// [H, N + O] in the place of latents and values [H, U] in that of rotary keys, for expanded attention alone.
struct Cache {
  const void* latent;
  const void* rope;
  long latent_stride, rope_stride;  // elements from one position to the next
  int bytes;                        // of a value of the latent
  long layer, pages, G;
  const float* scale = nullptr;
  bool by_head = false;
};
constexpr long kScaled = 128;

// What both forms share. Letters as in docs/glossary.md: R rows, C queries of each, H heads, N and O the widths of a head's
// query, U of its value, M of the latent.
struct Attention {
  const float* q_nope;   // [R, C, H, N]; without weights the query in latent space, [R, C, H, M]
  const float* q_rope;   // [R, C, H, O]
  const float* weights;  // W^UK and W^UV by head, [M, H, N + U]; null: queries and results stay in latent space
  Cache cache;
  const int32_t* start;   // [R]: position of a row's first query
  const int32_t* length;  // [R]: its queries; the others are padding, and so is a row of 0
  const int32_t* tables;  // [R, Pr]
  const uint8_t* filled;  // [pages, G]: 0 where a cache slot holds nothing, which only the query at that position sees; null: all do
  long R, C, H, N, O, U, M, Pr;
  float scale;
  float* out;  // [R, C, H, U], or [R, C, H, M] without weights
  int threads;
  // [R, C, ceil(Pr G / 32)]: one bit for each position that a query attends to, in expanded attention; null: to all that it sees
  const uint32_t* chosen = nullptr;

 protected:
  static float* floats(char* base, size_t& used, long count) {
    float* found = base ? reinterpret_cast<float*>(base + used) : nullptr;
    used += (4 * count + 63) / 64 * 64;
    return found;
  }
  static const float** pointers(char* base, size_t& used, long count) {
    const float** found = base ? reinterpret_cast<const float**>(base + used) : nullptr;
    used += (sizeof(void*) * count + 63) / 64 * 64;
    return found;
  }

  long queries(long row) const { return std::clamp<long>(length[row], 0, C); }
  // Positions that a row's first `count` queries see together; never more than its table holds.
  long context(long row, long count) const { return std::min<long>(start[row] + count, Pr * cache.G); }

  // Numbers of a latent, or of a head's key, and of a rotary key, or of a head's value.
  long latent_width() const { return cache.by_head ? N + O : M; }
  long rope_width() const { return cache.by_head ? U : O; }

  // Pointers to latents and rotary keys of positions [first, first + count) of a row: into the cache where that is float32,
  // else into `copy`, where they are widened to ([kBlock, M] and [kBlock, O]). Where the cache is by head, to the head's keys and values.
  void find(long row, long first, long count, const float** latent, const float** rope, float* copy, long head = 0) const {
    const long from_latent = cache.by_head ? head * (N + O) : 0, from_rope = cache.by_head ? head * U : 0;
    long page = first / cache.G, slot = first % cache.G;
    for (long i = 0; i < count; i++, slot++) {
      if (slot == cache.G) page++, slot = 0;
      const long at = (cache.layer * cache.pages + tables[row * Pr + page]) * cache.G + slot;
      if (cache.bytes == 4) {
        latent[i] = static_cast<const float*>(cache.latent) + at * cache.latent_stride + from_latent;
        rope[i] = static_cast<const float*>(cache.rope) + at * cache.rope_stride + from_rope;
      } else {
        float* own = copy + i * latent_width();
        if (cache.bytes == 1)
          latent[i] = dequantise(static_cast<const uint8_t*>(cache.latent) + at * M, cache.scale + at * ((M + kScaled - 1) / kScaled), own);
        else
          latent[i] = widen(static_cast<const uint16_t*>(cache.latent) + at * cache.latent_stride + from_latent, own, latent_width());
        rope[i] = widen(static_cast<const uint16_t*>(cache.rope) + at * cache.rope_stride + from_rope,
                        copy + kBlock * latent_width() + i * rope_width(), rope_width());
      }
    }
  }

  // Numbers, counted from `first`, of the positions in [first, first + count) of a row that hold nothing.
  long holes(long row, long first, long count, int32_t* found) const {
    long holes = 0;
    if (filled)
      for (long i = 0; i < count; i++)
        if (!filled[tables[row * Pr + (first + i) / cache.G] * cache.G + (first + i) % cache.G]) found[holes++] = static_cast<int32_t>(i);
    return holes;
  }

  static const float* widen(const uint16_t* from, float* to, long count) {
    for (long i = 0; i < count; i++) to[i] = BFloat16::widen_one(from[i]);
    return to;
  }

  const float* dequantise(const uint8_t* from, const float* scale, float* to) const {
    for (long m = 0; m < M; scale++) {
      const long end = std::min(m + kScaled, M);
      for (; m + kLanes <= end; m += kLanes) store(to + m, Float8::widen(from + m) * *scale);
      for (; m < end; m++) to[m] = Float8::widen_one(from[m]) * *scale;
    }
    return to;
  }

  // to[w * kBlock + i] = from[i][w] for w < width and i < count; zero for i >= count.
  static void transposed(const float* const* from, long count, long width, float* to) {
    for (long i = 0; i < kBlock; i += kLanes) {
      long w = 0;
      if (i + kLanes <= count)
        for (; w + kLanes <= width; w += kLanes) {
          Vec square[kLanes];
          for (int lane = 0; lane < kLanes; lane++) square[lane] = load(from[i + lane] + w);
          transpose(square);
          for (int lane = 0; lane < kLanes; lane++) store(to + (w + lane) * kBlock + i, square[lane]);
        }
      for (; w < width; w++)
        for (long lane = 0; lane < kLanes; lane++) to[w * kBlock + i + lane] = i + lane < count ? from[i + lane][w] : 0.0f;
    }
  }

  // One query's part of a block: from scores [kBlock] to weights e^(scaled score - maximum), 0 for positions that it does not see
  // (those from `seen` on); its running maximum and sum (arXiv 1805.02867). Returns what earlier results are multiplied with.
  float weigh(float* scores, long seen, float& maximum, float& total) const {
    for (long i = std::max<long>(seen, 0); i < kBlock; i++) scores[i] = kUnseen;
    Vec most = broadcast(kUnseen);
    for (long i = 0; i < kBlock; i += kLanes) most = larger(most, load(scores + i));
    const float higher = std::max(maximum, largest(most) * scale);
    Vec added{};
    for (long i = 0; i < kBlock; i += kLanes) {
      Vec value = exp(load(scores + i) * scale - higher);
      added += value;
      store(scores + i, value);
    }
    const float shrink = exp(broadcast(maximum - higher))[0];
    total = total * shrink + sum(added);
    maximum = higher;
    return shrink;
  }

  static void multiply(float* values, long count, float factor) {
    for (long i = 0; i < count; i++) values[i] *= factor;
  }
};

// In latent space, all heads against the one latent they share: for decodes, and a few tokens more (speculation).
// W^UK goes into the queries first and W^UV onto the results last, each head's matrix once for all rows.
struct AbsorbedAttention : Attention {
  size_t scratch_bytes() const { return layout(nullptr).total; }

  void run(char* scratch, const Schedule& schedule) const {
    const Layout at = layout(scratch);
    const long per_row = items_of_a_row(), width = weights ? U : M;
    for (long r = 0; r < R; r++) {
      // Padding is zero: whatever lay in memory could be no number, and spread.
      const long from = queries(r) * H * width;
      std::fill(out + r * C * H * width + from, out + (r + 1) * C * H * width, 0.0f);
    }
    Phases::run(
        3, [&](int phase) { return phase == 1 ? R * per_row : weights ? H : 0; },
        [&](int phase, long item, int worker) {
          if (phase == 0) absorb_query(at, item, worker);
          if (phase == 1) attend(at, item / per_row, item % per_row, worker);
          if (phase == 2) absorb_value(at, item, worker);
        },
        threads, schedule);
  }

 private:
  struct Layout {
    float *q_latent, *heads;  // [R, C, H, M] each, with weights
    char* own;
    size_t own_bytes, total;
  };
  struct Own {  // a worker's
    float *query, *copy, *scores, *key, *maximum, *total;
    const float **latent, **rope, **a, **c;
    size_t bytes;
  };
  static constexpr long kMostLanes = (kItemQueries + kLanes - 1) / kLanes * kLanes;

  long items_of_a_row() const {
    const long least = (C * H + kItemQueries - 1) / kItemQueries, wanted = (2 * threads + R - 1) / R;
    return threads > 1 ? std::max(least, std::min(wanted, (C * H + 3) / 4)) : least;
  }

  Own own(char* base) const {
    Own o;
    size_t used = 0;
    o.query = floats(base, used, (M + O) * kMostLanes);
    o.copy = floats(base, used, cache.bytes == 4 ? 0 : (M + O) * kBlock);
    o.scores = floats(base, used, kMostLanes * kBlock);
    o.maximum = floats(base, used, kMostLanes);
    o.total = floats(base, used, kMostLanes);
    o.key = floats(base, used, weights ? N * M : 0);
    o.latent = pointers(base, used, kBlock);
    o.rope = pointers(base, used, kBlock);
    o.a = pointers(base, used, std::max({R * C, kItemQueries, kBlock}));
    o.c = pointers(base, used, std::max({R * C, kItemQueries, kBlock}));
    o.bytes = used;
    return o;
  }

  Layout layout(char* base) const {
    Layout at;
    size_t used = 0;
    at.q_latent = floats(base, used, weights ? R * C * H * M : 0);
    at.heads = floats(base, used, weights ? R * C * H * M : 0);
    at.own = base ? base + used : nullptr;
    at.own_bytes = own(nullptr).bytes;
    at.total = used + at.own_bytes * std::max(threads, 1);
    return at;
  }

  // The queries that are no padding, as pointers `apart` elements from one head to the next.
  long all_queries(const float* from, long head, long width, const float** to) const {
    long count = 0;
    for (long r = 0; r < R; r++)
      for (long c = 0; c < queries(r); c++) to[count++] = from + ((r * C + c) * H + head) * width;
    return count;
  }

  void absorb_query(const Layout& at, long head, int worker) const {
    Own o = own(at.own + at.own_bytes * worker);
    const long count = all_queries(q_nope, head, N, o.a);
    all_queries(at.q_latent, head, M, o.c);
    // W^UK of the head transposed, [N, M]: its rows run along the latent then.
    for (long m = 0; m < M; m++)
      for (long n = 0; n < N; n++) o.key[n * M + m] = weights[(m * H + head) * (N + U) + n];
    product(count, o.a, 1, Matrix<Float32>{o.key, M}, 0, M, N, const_cast<float**>(o.c), Sums::replace);
  }

  void absorb_value(const Layout& at, long head, int worker) const {
    Own o = own(at.own + at.own_bytes * worker);
    const long count = all_queries(at.heads, head, M, o.a);
    all_queries(out, head, U, o.c);
    const Matrix<Float32> value{weights + head * (N + U) + N, H * (N + U)};
    product(count, o.a, 1, value, 0, U, M, const_cast<float**>(o.c), Sums::replace);
  }

  void attend(const Layout& at, long row, long part, int worker) const {
    const long all = queries(row) * H, parts = items_of_a_row();
    const long first = all * part / parts, count = all * (part + 1) / parts - first;
    if (count == 0) return;
    Own o = own(at.own + at.own_bytes * worker);
    const float* q_latent = weights ? at.q_latent : q_nope;
    float* heads = weights ? at.heads : out;
    // Queries lie side by side in vectors: scores are [kBlock, lanes], the context is read row by row as it lies in its pages,
    // and nothing is summed or compared across a vector.
    const long lanes = (count + kLanes - 1) / kLanes * kLanes;
    std::fill(o.query, o.query + (M + O) * lanes, 0.0f);
    for (long q = 0; q < count; q++) {
      const long query = row * C * H + first + q;
      for (long m = 0; m < M; m++) o.query[m * lanes + q] = q_latent[query * M + m];
      for (long r = 0; r < O; r++) o.query[(M + r) * lanes + q] = q_rope[query * O + r];
      std::fill(heads + query * M, heads + (query + 1) * M, 0.0f);
    }
    std::fill(o.maximum, o.maximum + lanes, -1e30f);
    std::fill(o.total, o.total + lanes, 0.0f);
    const long end = context(row, (first + count - 1) / H + 1);
    for (long s = 0; s < end; s += kBlock) {
      const long block = std::min(kBlock, end - s);
      find(row, s, block, o.latent, o.rope, o.copy);
      float** scores = const_cast<float**>(o.c);
      for (long i = 0; i < block; i++) scores[i] = o.scores + i * lanes;
      product(block, o.latent, 1, Matrix<Float32>{o.query, lanes}, 0, lanes, M, scores, Sums::replace);
      product(block, o.rope, 1, Matrix<Float32>{o.query + M * lanes, lanes}, 0, lanes, O, scores, Sums::add);
      int32_t hole[kBlock];
      const long holes_here = holes(row, s, block, hole);
      for (long h = 0; h < holes_here; h++)
        for (long q = 0; q < count; q++)
          if (start[row] + (first + q) / H != s + hole[h]) o.scores[hole[h] * lanes + q] = kUnseen;
      float** results = const_cast<float**>(o.c);
      for (long q = 0; q < count; q++) {
        results[q] = heads + (row * C * H + first + q) * M;
        o.a[q] = o.scores + q;
      }
      for (long q = 0; q < count; q += kLanes) {
        const Vec shrink = weigh_lanes(o, q, lanes, block, start[row] - s, first);
        for (long lane = 0; s > 0 && lane < kLanes && q + lane < count; lane++)
          if (shrink[lane] != 1.0f) multiply(results[q + lane], M, shrink[lane]);
      }
      product(count, o.a, lanes, Scattered{o.latent}, 0, M, block, results, Sums::add);
    }
    for (long q = 0; q < count; q++) multiply(heads + (row * C * H + first + q) * M, M, 1.0f / o.total[q]);
  }

  // `weigh` for kLanes queries from `q` on, side by side. Of them, query number i (of the row, `first` + q and so on) sees the
  // block's positions up to `offset` + i / H.
  Vec weigh_lanes(const Own& o, long q, long lanes, long block, long offset, long first) const {
    IntVec last;
    for (int lane = 0; lane < kLanes; lane++) last[lane] = static_cast<int32_t>(std::min<long>(offset + (first + q + lane) / H, kBlock));
    Vec most = broadcast(kUnseen);
    const long seen_by_all = std::min(block, offset + (first + q) / H + 1);
    for (long i = 0; i < block; i++) {
      float* at = o.scores + i * lanes + q;
      Vec score = load(at) * scale;
      if (i >= seen_by_all) score = last >= static_cast<int32_t>(i) ? score : broadcast(kUnseen);
      most = larger(most, score);
      store(at, score);
    }
    const Vec before = load(o.maximum + q), higher = larger(before, most);
    Vec added{};
    for (long i = 0; i < block; i++) {
      float* at = o.scores + i * lanes + q;
      const Vec value = exp(load(at) - higher);
      added += value;
      store(at, value);
    }
    const Vec shrink = exp(before - higher);
    store(o.total + q, load(o.total + q) * shrink + added);
    store(o.maximum + q, higher);
    return shrink;
  }
};

// With keys and values of each head, expanded from the latents a block at a time: for the many queries of a prompt. Or as the cache keeps
// them, by head: the same numbers where it keeps them in float32, and so the same results.
struct ExpandedAttention : Attention {
  size_t scratch_bytes() const { return own(nullptr).bytes * std::max(threads, 1); }

  void run(char* scratch, const Schedule& schedule) const {
    for (long r = 0; r < R; r++)
      std::fill(out + (r * C + queries(r)) * H * U, out + (r + 1) * C * H * U, 0.0f);
    const size_t bytes = own(nullptr).bytes;
    Phases::run(
        1, [&](int) { return R * H; },
        [&](int, long item, int worker) { attend(item / H, item % H, own(scratch + bytes * worker)); }, threads, schedule);
  }

 private:
  struct Own {
    float *query, *context, *copy, *keys, *values, *scores, *maximum, *total;
    const float **latent, **rope, **rows, **from, **to;
    size_t bytes;
  };

  Own own(char* base) const {
    Own o;
    size_t used = 0;
    o.query = floats(base, used, C * (N + O));
    o.context = floats(base, used, cache.by_head ? 0 : M * kBlock);
    o.copy = floats(base, used, cache.bytes == 4 ? 0 : (latent_width() + rope_width()) * kBlock);
    o.keys = floats(base, used, (N + O) * kBlock);
    o.values = floats(base, used, U * kBlock);
    o.scores = floats(base, used, kItemQueries * kBlock);
    o.maximum = floats(base, used, C);
    o.total = floats(base, used, C);
    o.latent = pointers(base, used, kBlock);
    o.rope = pointers(base, used, kBlock);
    o.rows = pointers(base, used, 2 * kItemQueries);
    o.from = pointers(base, used, std::max(N, kBlock));
    o.to = pointers(base, used, std::max(N, kBlock));
    o.bytes = used;
    return o;
  }

  // Keys [N + O, kBlock] and values [kBlock, U] of one head and block.
  void expand(const Own& o, long head, long block, long rounded) const {
    if (cache.by_head) {
      transposed(o.latent, block, N + O, o.keys);
      for (long i = 0; i < block; i++) std::copy(o.rope[i], o.rope[i] + U, o.values + i * U);
      return;
    }
    transposed(o.latent, block, M, o.context);
    float** to = const_cast<float**>(o.to);
    for (long n = 0; n < N; n++) {
      o.from[n] = weights + head * (N + U) + n;
      to[n] = o.keys + n * kBlock;
    }
    product(N, o.from, H * (N + U), Matrix<Float32>{o.context, kBlock}, 0, rounded, M, to, Sums::replace);
    transposed(o.rope, block, O, o.keys + N * kBlock);
    for (long i = 0; i < block; i++) to[i] = o.values + i * U;
    const Matrix<Float32> up_value{weights + head * (N + U) + N, H * (N + U)};
    product(block, o.latent, 1, up_value, 0, U, M, to, Sums::replace);
  }

  long words() const { return (Pr * cache.G + 31) / 32; }

  // Scores of a block's first `seen` positions that were not chosen.
  static void leave_out(const uint32_t* word, long seen, float* scores) {
    for (long i = 0; i < seen; i++)
      if (!(word[i / 32] >> (i % 32) & 1)) scores[i] = kUnseen;
  }

  void attend(long row, long head, const Own& o) const {
    const long all = queries(row);
    if (all == 0) return;
    for (long q = 0; q < all; q++) {
      o.maximum[q] = -1e30f;
      o.total[q] = 0;
      float* result = out + ((row * C + q) * H + head) * U;
      std::fill(result, result + U, 0.0f);
      const long query = (row * C + q) * H + head;
      float* both = std::copy(q_nope + query * N, q_nope + (query + 1) * N, o.query + q * (N + O));
      std::copy(q_rope + query * O, q_rope + (query + 1) * O, both);
    }
    const float** a = o.rows;
    float** results = const_cast<float**>(o.rows + kItemQueries);
    float* scores[kItemQueries];
    for (long q = 0; q < kItemQueries; q++) scores[q] = o.scores + q * kBlock;
    const Matrix<Float32> keys{o.keys, kBlock}, values{o.values, U};
    const long end = context(row, all);
    for (long s = 0; s < end; s += kBlock) {
      const long block = std::min(kBlock, end - s), rounded = (block + kLanes - 1) / kLanes * kLanes;
      find(row, s, block, o.latent, o.rope, o.copy, head);
      int32_t hole[kBlock];
      const long holes_here = holes(row, s, block, hole);
      expand(o, head, block, rounded);
      // The first query that sees anything of this block.
      for (long first = std::max<long>(0, s - start[row]); first < all; first += kItemQueries) {
        const long count = std::min(kItemQueries, all - first);
        for (long q = 0; q < count; q++) {
          a[q] = o.query + (first + q) * (N + O);
          results[q] = out + ((row * C + first + q) * H + head) * U;
        }
        product(count, a, 1, keys, 0, rounded, N + O, scores, Sums::replace);
        long most = 0;
        for (long q = 0; q < count; q++) {
          const long own = start[row] + first + q - s, seen = std::min(block, own + 1);
          for (long h = 0; h < holes_here; h++)
            if (hole[h] != own) scores[q][hole[h]] = kUnseen;
          if (chosen) leave_out(chosen + (row * C + first + q) * words() + s / 32, seen, scores[q]);
          const float shrink = weigh(scores[q], seen, o.maximum[first + q], o.total[first + q]);
          if (s > 0 && shrink != 1.0f) multiply(results[q], U, shrink);
          most = std::max(most, seen);
        }
        product(count, const_cast<const float* const*>(scores), 1, values, 0, U, most, results, Sums::add);
      }
    }
    for (long q = 0; q < all; q++) multiply(out + ((row * C + q) * H + head) * U, U, 1.0f / o.total[q]);
  }
};

extern template void run_kernel(const AbsorbedAttention&, char*, const Schedule&);
extern template void run_kernel(const ExpandedAttention&, char*, const Schedule&);

}  // namespace dsjax
