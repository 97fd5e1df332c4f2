// Causal MLA attention of rows of queries over the paged cache, read in place: absorbed (decode), and expanded (prompts).
#pragma once

#include <algorithm>

#include "phases.h"
#include "products.h"

namespace dsjax {

constexpr long kBlock = 64;          // context positions taken at once
constexpr float kUnseen = -3e38f;    // the score of a position that a query does not see
constexpr long kItemQueries = 48;    // queries (tokens x heads) that share a block's transposed context
constexpr long kSeenTogether = 12;   // of a prompt's queries: so many are multiplied at once, with the positions that the last of them sees

// The cache of all layers, [layers, pages, G, *]: of each position a latent [M] and a rotary key [O]; both float32, both bfloat16, or
// the latent e4m3 with a scale for each kScaled of its values ([ceil(M / kScaled)]) and the rotary key bfloat16.
struct Cache {
  const void* latent;
  const void* rope;
  int bytes;  // of a value of the latent
  long layer, pages, G;
  const float* scale = nullptr;
};
constexpr long kScaled = 128;

// W^UK and W^UV where they lie in the stack of layers, [layers, M, columns]: of each head N columns for keys, then U for values. `bytes` of a
// value: 4 float32, 2 bfloat16, 1 e4m3 with scales [layers, M / kScaleBlock, columns / kScaleBlock].
struct KeyValueWeights {
  const void* data;
  int bytes;
  long layer, M, columns;
  const float* scale = nullptr;
  static constexpr long kAhead = 8;  // rows asked of memory before they are read: each is on a page of its own

  // Values [first, first + count) of row m: where they lie if those are float32, else widened to `copy`.
  const float* row(long m, long first, long count, float* copy) const {
    const long at = (layer * M + m) * columns + first;
    if (m + kAhead < M) {
      const char* ahead = static_cast<const char*>(data) + (at + kAhead * columns) * bytes;
      for (long byte = 0; byte < count * bytes; byte += 64) __builtin_prefetch(ahead + byte);
    }
    if (bytes == 4) return static_cast<const float*>(data) + at;
    if (bytes == 2) {
      widen<BFloat16>(static_cast<const uint16_t*>(data) + at, count, 1.0f, copy);
      return copy;
    }
    const float* factor = scale + (layer * blocks(M) + m / kScaleBlock) * blocks(columns);
    for (long i = 0, end; i < count; i = end) {
      const long block = (first + i) / kScaleBlock;
      end = std::min(count, (block + 1) * kScaleBlock - first);
      widen<Float8>(static_cast<const uint8_t*>(data) + at + i, end - i, factor[block], copy + i);
    }
    return copy;
  }

 private:
  static long blocks(long size) { return (size + kScaleBlock - 1) / kScaleBlock; }
};

// What kernels share that take their context a block of vectors at a time.
struct ByBlocks {
 protected:
  // Reads a number of each line of memory, so that the lines of many positions are on their way at once: multiply-adds would ask for few at
  // a time. With as many prefetches, which a processor may leave out, 256 rows of 160 positions took as long as without.
  static void fetch(const float* from, long count) {
    for (long i = 0; i < count; i += 16) static_cast<void>(*static_cast<const volatile float*>(from + i));
  }

  // to[w * stride + i] = from[i][w] for w < width and i < count; zero for count <= i < filled.
  static void transposed(const float* const* from, long count, long width, float* to, long stride, long filled) {
    for (long i = 0; i < filled; i += kLanes) {
      long w = 0;
      if (i + kLanes <= count) {
        for (; w + kLanes <= width; w += kLanes) {
          Vec square[kLanes];
          for (int lane = 0; lane < kLanes; lane++) square[lane] = load(from[i + lane] + w);
          transpose(square);
          for (int lane = 0; lane < kLanes; lane++) store(to + (w + lane) * stride + i, square[lane]);
        }
      } else if (i + kNarrowLanes == std::min(count, filled)) {
        for (; w + kLanes <= width; w += kLanes) {
          Vec square[kLanes] = {};
          for (int lane = 0; lane < kNarrowLanes; lane++) square[lane] = load(from[i + lane] + w);
          transpose(square);
          for (int lane = 0; lane < kLanes; lane++)
            store(to + (w + lane) * stride + i, load_as<NarrowVec>(reinterpret_cast<const float*>(&square[lane])));
        }
        if (filled > i + kNarrowLanes) zero(w, to, stride, i + kNarrowLanes, std::min(i + kLanes, filled));
      }
      const long end = std::min(i + kLanes, filled);
      for (; w < width; w++)
        for (long j = i; j < end; j++) to[w * stride + j] = j < count ? from[j][w] : 0.0f;
    }
  }

  // to[w * stride + i] = 0 for w < width and first <= i < end.
  static void zero(long width, float* to, long stride, long first, long end) {
    for (long w = 0; w < width; w++) std::fill(to + w * stride + first, to + w * stride + end, 0.0f);
  }

  static void multiply(float* values, long count, float factor) {
    for (long i = 0; i < count; i++) values[i] *= factor;
  }
};

// What both forms of MLA share. Letters as in docs/glossary.md: R rows, C queries of each, H heads, N and O the widths of a head's
// query, U of its value, M of the latent.
struct Attention : ByBlocks {
  const float* q_nope;   // [R, C, H, N]
  const float* q_rope;   // [R, C, H, O]
  KeyValueWeights weights;
  Cache cache;
  const int32_t* start;   // [R]: position of a row's first query
  const int32_t* length;  // [R]: its queries; the others are padding, and so is a row of 0
  const int32_t* tables;  // [R, Pr]
  const uint8_t* filled;  // [pages, G]: 0 where a cache slot holds nothing, which only the query at that position sees; null: all do
  long R, C, H, N, O, U, M, Pr;
  float scale;
  float* out;  // [R, C, H, U]
  int threads;
  // [R, C, ceil(Pr G / 32)]: one bit for each position that a query attends to, in expanded attention; null: to all that it sees
  const uint32_t* chosen = nullptr;

 protected:
  long queries(long row) const { return std::clamp<long>(length[row], 0, C); }
  // Zero the outputs of padding queries: a NaN left in memory would spread.
  void clear_padding() const {
    for (long r = 0; r < R; r++) std::fill(out + (r * C + queries(r)) * H * U, out + (r + 1) * C * H * U, 0.0f);
  }
  // Positions that a row's first `count` queries see together; never more than its table holds.
  long context(long row, long count) const { return std::min<long>(start[row] + count, Pr * cache.G); }

  // Pointers to latents and rotary keys of positions [first, first + count) of a row: into the cache where that is float32,
  // else into `copy`, where they are widened to ([kBlock, M] and [kBlock, O]).
  void find(long row, long first, long count, const float** latent, const float** rope, float* copy) const {
    long page = first / cache.G, slot = first % cache.G;
    for (long i = 0; i < count; i++, slot++) {
      if (slot == cache.G) page++, slot = 0;
      const long at = (cache.layer * cache.pages + tables[row * Pr + page]) * cache.G + slot;
      if (cache.bytes == 4) {
        latent[i] = static_cast<const float*>(cache.latent) + at * M;
        rope[i] = static_cast<const float*>(cache.rope) + at * O;
        fetch(latent[i], M), fetch(rope[i], O);
      } else {
        float* own = copy + i * M;
        float* own_rope = copy + kBlock * M + i * O;
        if (cache.bytes == 2) widen<BFloat16>(static_cast<const uint16_t*>(cache.latent) + at * M, M, 1.0f, own);
        for (long m = 0; cache.bytes == 1 && m < M; m += kScaled) {
          const float factor = cache.scale[at * ((M + kScaled - 1) / kScaled) + m / kScaled];
          widen<Float8>(static_cast<const uint8_t*>(cache.latent) + at * M + m, std::min(kScaled, M - m), factor, own + m);
        }
        widen<BFloat16>(static_cast<const uint16_t*>(cache.rope) + at * O, O, 1.0f, own_rope);
        latent[i] = own, rope[i] = own_rope;
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

  // The part of up to kLanes queries in a block: from each one's scores [kBlock] to weights e^(scaled score - maximum), 0 for positions that
  // it does not see (those from `seen` on, of which whole vectors are left as they are); their running maxima and sums (arXiv 1805.02867),
  // [kLanes] with room for a whole vector. Returns what earlier results are multiplied with. What a vector of scores has is added up
  // lane after lane, for all queries at once.
  Vec weigh(long queries, float* const* scores, const long* seen, float* maximum, float* total) const {
    Vec most[kLanes], added[kLanes];
    for (long q = 0; q < kLanes; q++) {
      most[q] = broadcast(kUnseen);
      if (q >= queries) continue;
      for (long i = 0; i < seen[q]; i += kLanes) {
        const Vec score = load(scores[q] + i), own = counted() < static_cast<int32_t>(seen[q] - i) ? score : broadcast(kUnseen);
        most[q] = larger(most[q], own);
        store(scores[q] + i, own);
      }
    }
    transpose(most);
    for (long lane = 1; lane < kLanes; lane++) most[0] = larger(most[lane], most[0]);
    const Vec before = load(maximum), higher = larger(most[0] * scale, before);
    store(maximum, higher);
    for (long q = 0; q < kLanes; q++) {
      added[q] = Vec{};
      if (q >= queries) continue;
      for (long i = 0; i < seen[q]; i += kLanes) {
        const Vec value = exp(load(scores[q] + i) * scale - maximum[q]);
        added[q] += value;
        store(scores[q] + i, value);
      }
    }
    transpose(added);
    for (long lane = 1; lane < kLanes; lane++) added[0] += added[lane];
    const Vec shrink = exp(before - higher);
    store(total, load(total) * shrink + added[0]);
    return shrink;
  }

  // 0, 1, 2 ...
  static IntVec counted() {
    IntVec number;
    for (int lane = 0; lane < kLanes; lane++) number[lane] = lane;
    return number;
  }

  // Copies by vectors, since most copies are too short for a call of memmove, and returns where the next one begins.
  static float* copy(const float* from, long count, float* to) {
    long i = 0;
    for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
    for (; i < count; i++) to[i] = from[i];
    return to + count;
  }

  // `weights.row`, always copied.
  void side_by_side(long m, long first, long count, float* to) const {
    const float* found = weights.row(m, first, count, to);
    if (found != to) copy(found, count, to);
  }

};

// In latent space, all heads against the one latent they share: for decodes, and a few tokens more (speculation).
// W^UK goes into the queries first and W^UV onto the results last, each head's matrix once for all rows.
struct AbsorbedAttention : Attention {
  size_t scratch_bytes() const { return layout(nullptr).scratch.bytes(); }

  void run(char* scratch, const Schedule& schedule) const {
    const Layout at = layout(scratch);
    const int workers = work() < kLeastWork ? 1 : threads;
    const long per_row = items_of_a_row(workers);
    clear_padding();
    Phases::run(
        3, [&](int phase) { return phase == 1 ? R * per_row : H; },
        [&](int phase, long item, int worker) {
          if (phase == 0) absorb_query(at, item, worker);
          if (phase == 1) attend(at, item / per_row, item % per_row, per_row, worker);
          if (phase == 2) absorb_value(at, item, worker);
        },
        workers, schedule);
  }

 private:
  static constexpr long kMostLanes = whole_vectors(kItemQueries);

  struct Own {  // a worker's working memory
    const AbsorbedAttention& of;
    Scratch scratch;
    long most = std::max({of.R * of.C, kItemQueries, kBlock});
    float* query = scratch.take<float>((of.M + of.O) * kMostLanes);
    float* copy = scratch.take<float>(of.cache.bytes == 4 ? 0 : (of.M + of.O) * kBlock);
    float* scores = scratch.take<float>(kMostLanes * kBlock);
    float* maximum = scratch.take<float>(kMostLanes);
    float* total = scratch.take<float>(kMostLanes);
    float* rows = scratch.take<float>(of.N * kBlock);
    float* block = scratch.take<float>(std::max(of.N, of.U) * kBlock);
    const float** latent = scratch.take<const float*>(kBlock);
    const float** rope = scratch.take<const float*>(kBlock);
    const float** a = scratch.take<const float*>(most);
    const float** c = scratch.take<const float*>(most);
  };
  struct Layout {
    const AbsorbedAttention& of;
    Scratch scratch;
    float* q_latent = scratch.take<float>(of.R * of.C * of.H * of.M);
    float* heads = scratch.take<float>(of.R * of.C * of.H * of.M);
    size_t own_bytes = of.own(nullptr).scratch.bytes();
    char* own = scratch.take<char>(own_bytes * std::max(of.threads, 1));
  };
  Own own(char* base) const { return {*this, Scratch(base)}; }
  Layout layout(char* base) const { return {*this, Scratch(base)}; }

  // Multiply-adds of a call.
  long work() const {
    long total = 0;
    for (long r = 0; r < R; r++) {
      const long count = queries(r);
      total += count * H * (context(r, count) * (2 * M + O) + M * (N + U));
    }
    return total;
  }

  long items_of_a_row(int workers) const {
    const long least = (C * H + kItemQueries - 1) / kItemQueries, wanted = (2 * workers + R - 1) / R;
    return workers > 1 ? std::max(least, std::min(wanted, (C * H + 3) / 4)) : least;
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
    // W^UK of the head transposed, a block at a time, [N, kBlock]: its rows run along the latent then.
    for (long m = 0; m < M; m += kBlock) {
      const long rows = std::min(kBlock, M - m);
      for (long i = 0; i < rows; i++) o.latent[i] = weights.row(m + i, head * (N + U), N, o.rows + i * N);
      transposed(o.latent, rows, N, o.block, kBlock, rows);
      product(count, o.a, 1, Matrix<Float32>{o.block, kBlock}, 0, rows, N, const_cast<float**>(o.c), Sums::replace, m);
    }
  }

  void absorb_value(const Layout& at, long head, int worker) const {
    Own o = own(at.own + at.own_bytes * worker);
    const long count = all_queries(at.heads, head, M, o.a);
    all_queries(out, head, U, o.c);
    // W^UV of the head side by side, a block at a time: as far apart as they are, its rows would drive each other out of the first cache.
    for (long m = 0; m < M; m += kBlock) {
      const long rows = std::min(kBlock, M - m);
      for (long i = 0; i < rows; i++) side_by_side(m + i, head * (N + U) + N, U, o.block + i * U);
      product(count, o.a, 1, Matrix<Float32>{o.block, U}, 0, U, rows, const_cast<float**>(o.c), m == 0 ? Sums::replace : Sums::go_on);
      for (long q = 0; q < count; q++) o.a[q] += rows;
    }
  }

  void attend(const Layout& at, long row, long part, long parts, int worker) const {
    const long all = queries(row) * H;
    const long first = all * part / parts, count = all * (part + 1) / parts - first;
    if (count == 0) return;
    const Own o = own(at.own + at.own_bytes * worker);
    if (count <= kNarrowLanes) attend_in<NarrowVec>(at, row, first, count, o);
    else attend_in<Vec>(at, row, first, count, o);
  }

  // `attend` for `count` queries from `first` on, which lie in vectors of V.
  template <class V>
  void attend_in(const Layout& at, long row, long first, long count, const Own& o) const {
    constexpr long wide = lanes_of<V>;
    // Queries lie side by side in vectors: scores are [kBlock, lanes], the context is read row by row as it lies in its pages,
    // and nothing is summed or compared across a vector.
    const long lanes = (count + wide - 1) / wide * wide, query = row * C * H + first;
    for (long q = 0; q < count; q++) o.a[q] = at.q_latent + (query + q) * M, o.c[q] = q_rope + (query + q) * O;
    transposed(o.a, count, M, o.query, lanes, lanes);
    transposed(o.c, count, O, o.query + M * lanes, lanes, lanes);
    std::fill(at.heads + query * M, at.heads + (query + count) * M, 0.0f);
    std::fill(o.maximum, o.maximum + lanes, -1e30f);
    std::fill(o.total, o.total + lanes, 0.0f);
    const long end = context(row, (first + count - 1) / H + 1);
    for (long s = 0; s < end; s += kBlock) {
      const long block = std::min(kBlock, end - s);
      find(row, s, block, o.latent, o.rope, o.copy);
      if (lanes == wide) {
        score_all<V>(o, block);
      } else {
        float** scores = const_cast<float**>(o.c);
        for (long i = 0; i < block; i++) scores[i] = o.scores + i * lanes;
        product(block, o.latent, 1, Matrix<Float32>{o.query, lanes}, 0, lanes, M, scores, Sums::replace);
        product(block, o.rope, 1, Matrix<Float32>{o.query + M * lanes, lanes}, 0, lanes, O, scores, Sums::add);
      }
      int32_t hole[kBlock];
      const long holes_here = holes(row, s, block, hole);
      for (long h = 0; h < holes_here; h++)
        for (long q = 0; q < count; q++)
          if (start[row] + (first + q) / H != s + hole[h]) o.scores[hole[h] * lanes + q] = kUnseen;
      float** results = const_cast<float**>(o.c);
      for (long q = 0; q < count; q++) {
        results[q] = at.heads + (row * C * H + first + q) * M;
        o.a[q] = o.scores + q;
      }
      for (long q = 0; q < count; q += wide) {
        const V shrink = weigh_lanes<V>(o, q, lanes, block, start[row] - s, first);
        for (long lane = 0; s > 0 && lane < wide && q + lane < count; lane++)
          if (shrink[lane] != 1.0f) multiply(results[q + lane], M, shrink[lane]);
      }
      product(count, o.a, lanes, Scattered{o.latent}, 0, M, block, results, Sums::add);
    }
    for (long q = 0; q < count; q++) multiply(at.heads + (row * C * H + first + q) * M, M, 1.0f / o.total[q]);
  }

  // A block's scores for queries that fill one vector, [block, wide]; each is two sums, over the latent and the rotary key, as of `product`.
  template <class V>
  void score_all(const Own& o, long block) const {
    constexpr long wide = lanes_of<V>;
    for (long i = block; i < (block + kScored - 1) / kScored * kScored; i++) o.latent[i] = o.latent[block - 1], o.rope[i] = o.rope[block - 1];
    for (long i = 0; i < block; i += kScored) score<V>(o.latent + i, o.rope + i, o.query, M, O, o.scores + i * wide);
  }

  static constexpr int kScored = kRegisters == 32 ? 16 : 8;  // positions whose scores are summed at once; kBlock is a multiple

  template <class V>
  __attribute__((noinline)) static void score(const float* const* latent, const float* const* rope, const float* query, long M, long O, float* to) {
    V total[kScored] = {};
    add_products(latent, query, M, total);
    DSJAX_EACH(i, kScored) {
      store(to + i * lanes_of<V>, total[i]);
      total[i] = V{};
    }
    add_products(rope, query + M * lanes_of<V>, O, total);
    DSJAX_EACH(i, kScored) store(to + i * lanes_of<V>, load_as<V>(to + i * lanes_of<V>) + total[i]);
  }

  // total[i] += sum over k < depth of context[i][k] * query[k], in turn.
  template <class V>
  static inline __attribute__((always_inline)) void add_products(const float* const* context, const float* query, long depth, V (&total)[kScored]) {
    constexpr int kSteps = 2;  // for which an address is found once
    long k = 0;
    for (; k + kSteps <= depth; k += kSteps) {
      V x[kSteps];
      DSJAX_EACH(step, kSteps) x[step] = load_as<V>(query + (k + step) * lanes_of<V>);
      DSJAX_EACH(i, kScored) {
        const float* from = context[i] + k;
        DSJAX_EACH(step, kSteps) total[i] += broadcast<V>(from[step]) * x[step];
      }
    }
    for (; k < depth; k++) {
      const V x = load_as<V>(query + k * lanes_of<V>);
      DSJAX_EACH(i, kScored) total[i] += broadcast<V>(context[i][k]) * x;
    }
  }

  // `weigh` for as many queries as V has lanes from `q` on, side by side. Of them, query number i (of the row, `first` + q and so on)
  // sees the block's positions up to `offset` + i / H.
  template <class V>
  V weigh_lanes(const Own& o, long q, long lanes, long block, long offset, long first) const {
    constexpr int wide = lanes_of<V>;
    IntsOf<V> last;
    for (int lane = 0; lane < wide; lane++) last[lane] = static_cast<int32_t>(std::min<long>(offset + (first + q + lane) / H, kBlock));
    V most = broadcast<V>(kUnseen);
    const long seen_by_all = std::min(block, offset + (first + q) / H + 1);
    for (long i = 0; i < block; i++) {
      float* at = o.scores + i * lanes + q;
      V score = load_as<V>(at) * scale;
      if (i >= seen_by_all) score = last >= static_cast<int32_t>(i) ? score : broadcast<V>(kUnseen);
      most = larger(most, score);
      store(at, score);
    }
    const V before = load_as<V>(o.maximum + q), higher = larger(before, most);
    V added{};
    for (long i = 0; i < block; i++) {
      float* at = o.scores + i * lanes + q;
      const V value = exp(load_as<V>(at) - higher);
      added += value;
      store(at, value);
    }
    const V shrink = exp(before - higher);
    store(o.total + q, load_as<V>(o.total + q) * shrink + added);
    store(o.maximum + q, higher);
    return shrink;
  }
};

// With keys and values of each head, expanded from the latents a block at a time: for the many queries of a prompt.
struct ExpandedAttention : Attention {
  size_t scratch_bytes() const { return own(nullptr).scratch.bytes() * std::max(threads, 1); }

  void run(char* scratch, const Schedule& schedule) const {
    clear_padding();
    const size_t bytes = own(nullptr).scratch.bytes();
    Phases::run(
        1, [&](int) { return R * H; },
        [&](int, long item, int worker) { attend(item / H, item % H, own(scratch + bytes * worker)); }, threads, schedule);
  }

 private:
  struct Own {  // a worker's working memory
    const ExpandedAttention& of;
    Scratch scratch;
    float* query = scratch.take<float>(of.C * (of.N + of.O));
    float* up = scratch.take<float>(of.M * (of.N + of.U));
    float* context = scratch.take<float>(of.M * kBlock);
    float* copy = scratch.take<float>(of.cache.bytes == 4 ? 0 : (of.M + of.O) * kBlock);
    float* keys = scratch.take<float>((of.N + of.O) * kBlock);
    float* values = scratch.take<float>(of.U * kBlock);
    float* scores = scratch.take<float>(kItemQueries * kBlock);
    float* maximum = scratch.take<float>(of.C + kLanes);
    float* total = scratch.take<float>(of.C + kLanes);
    const float** latent = scratch.take<const float*>(kBlock);
    const float** rope = scratch.take<const float*>(kBlock);
    const float** rows = scratch.take<const float*>(kItemQueries);
    float** results = scratch.take<float*>(kItemQueries);
    const float** from = scratch.take<const float*>(std::max(of.N, kBlock));
    float** to = scratch.take<float*>(std::max(of.N, kBlock));
  };
  Own own(char* base) const { return {*this, Scratch(base)}; }

  // Keys [N + O, kBlock] and values [kBlock, U] of one head and block.
  void expand(const Own& o, long block, long rounded) const {
    transposed(o.latent, block, M, o.context, kBlock, kBlock);
    float** to = o.to;
    for (long n = 0; n < N; n++) {
      o.from[n] = o.up + n;
      to[n] = o.keys + n * kBlock;
    }
    product(N, o.from, N + U, Matrix<Float32>{o.context, kBlock}, 0, rounded, M, to, Sums::replace);
    transposed(o.rope, block, O, o.keys + N * kBlock, kBlock, kBlock);
    for (long i = 0; i < block; i++) to[i] = o.values + i * U;
    const Matrix<Float32> up_value{o.up + N, N + U};
    product(block, o.latent, 1, up_value, 0, U, M, to, Sums::replace);
  }

  // Scores of a block's first `seen` positions that were not chosen.
  static void leave_out(const uint32_t* word, long seen, float* scores) {
    for (long i = 0; i < seen; i++)
      if (!(word[i / 32] >> (i % 32) & 1)) scores[i] = kUnseen;
  }

  void attend(long row, long head, const Own& o) const {
    const long all = queries(row);
    if (all == 0) return;
    // W^UK and W^UV of the head side by side: as far apart as they are, their rows would drive each other out of the first cache.
    for (long m = 0; m < M; m++) side_by_side(m, head * (N + U), N + U, o.up + m * (N + U));
    std::fill(o.maximum, o.maximum + C + kLanes, -1e30f);
    std::fill(o.total, o.total + C + kLanes, 0.0f);
    for (long q = 0; q < all; q++) {
      float* result = out + ((row * C + q) * H + head) * U;
      std::fill(result, result + U, 0.0f);
      const long query = (row * C + q) * H + head;
      copy(q_rope + query * O, O, copy(q_nope + query * N, N, o.query + q * (N + O)));
    }
    const float** a = o.rows;
    float* scores[kItemQueries];
    for (long q = 0; q < kItemQueries; q++) scores[q] = o.scores + q * kBlock;
    const Matrix<Float32> keys{o.keys, kBlock}, values{o.values, U};
    const long end = context(row, all);
    for (long s = 0; s < end; s += kBlock) {
      const long block = std::min(kBlock, end - s), rounded = whole_vectors(block);
      find(row, s, block, o.latent, o.rope, o.copy);
      int32_t hole[kBlock];
      const long holes_here = holes(row, s, block, hole);
      expand(o, block, rounded);
      // The first query that sees anything of this block.
      for (long first = std::max<long>(0, s - start[row]); first < all; first += kItemQueries) {
        const long count = std::min(kItemQueries, all - first);
        for (long q = 0; q < count; q++) {
          a[q] = o.query + (first + q) * (N + O);
          o.results[q] = out + ((row * C + first + q) * H + head) * U;
        }
        // Queries go in groups, so that most positions that a query does not see are not multiplied.
        long seen[kItemQueries];
        for (long q = 0; q < count; q++) seen[q] = std::min(block, start[row] + first + q - s + 1);
        auto by_groups = [&](auto use) {
          for (long q = 0; q < count; q += kSeenTogether) {
            const long together = std::min(kSeenTogether, count - q);
            use(q, together, seen[q + together - 1]);
          }
        };
        by_groups([&](long q, long together, long most) {
          product(together, a + q, 1, keys, 0, whole_vectors(most), N + O, scores + q, Sums::replace);
        });
        for (long q = 0; q < count; q++) {
          for (long h = 0; h < holes_here; h++)
            if (hole[h] != start[row] + first + q - s) scores[q][hole[h]] = kUnseen;
          if (chosen) leave_out(chosen + (row * C + first + q) * ((Pr * cache.G + 31) / 32) + s / 32, seen[q], scores[q]);
        }
        for (long q = 0; q < count; q += kLanes) {
          const long lanes = std::min<long>(kLanes, count - q);
          const Vec shrink = weigh(lanes, scores + q, seen + q, o.maximum + first + q, o.total + first + q);
          for (long lane = 0; s > 0 && lane < lanes; lane++)
            if (shrink[lane] != 1.0f) multiply(o.results[q + lane], U, shrink[lane]);
        }
        by_groups([&](long q, long together, long most) {
          // Up to where the last of them sees, and where weights of the others may be left over from scores.
          for (long i = q; i < q + together; i++)
            for (long p = whole_vectors(seen[i]); p < most; p++) scores[i][p] = 0.0f;
          product(together, const_cast<const float* const*>(scores) + q, 1, values, 0, U, most, o.results + q, Sums::add);
        });
      }
    }
    for (long q = 0; q < all; q++) multiply(out + ((row * C + q) * H + head) * U, U, 1.0f / o.total[q]);
  }
};

extern template void run_kernel(const AbsorbedAttention&, char*, const Schedule&);
extern template void run_kernel(const ExpandedAttention&, char*, const Schedule&);

}  // namespace dsjax
