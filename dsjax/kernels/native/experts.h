// The routed experts' product of one rank: out[n] = sum_k weight[n, k] * Expert_{id[n, k]}(row[n]), SwiGLU experts. A row's sum is made
// in the order of its choices, whichever experts' numbers they have, and whatever other rows there are (docs/exactness.md).
#pragma once

#include <algorithm>

#include "fp4.h"
#include "phases.h"
#include "products.h"
#include "quantise.h"

namespace dsjax {

constexpr long kChunkRows = 48;    // rows of an expert that one item takes
constexpr long kFewPairs = 64;      // up to so many pairs in all, strips of the result are as wide as threads allow
constexpr long kRoundPairs = 4096;  // (row, expert) pairs whose hidden values are kept at once; all of a row's are in one round

// What hidden values are rounded to before they are multiplied with an expert's second matrix.
enum class Hidden : int64_t { float32 = 0, fp8 = 1, nvfp4 = 2 };

// to[0 .. count) = the sum of the terms 0 to K - 1 in this order, without those for which term(k) is null; zero if all are.
template <class Term>
void add_in_order(long K, const Term& term, long count, float* to) {
  bool any = false;
  for (long k = 0; k < K; k++) {
    const float* own = term(k);
    if (!own) continue;
    if (any) add_row(own, count, to);
    else std::copy(own, own + count, to), any = true;
  }
  if (!any) std::fill(to, to + count, 0.0f);
}

struct Experts {
  // Weights: gate and up [layers, X, D, 2, F], down [layers, X, F, D]; `bytes` of an element: 4 float32, 2 bfloat16, 1 FP8 with
  // scales [layers, X, D/128, 2, F/128] and [layers, X, F/128, D/128].
  const void* gate_up;
  const void* down;
  // Packed, `fp4_block` 16 or 32: two values a byte, [layers, X, D/2, 2, F] and [layers, X, F/2, D], with scales of a byte, or with
  // `integers` in bfloat16, [layers, X, D/block, 2, F] and [layers, X, F/block, D].
  const void* gate_up_scale;
  const void* down_scale;
  int bytes;
  long layer, X, D, F;
  // Rows [N, D] in rows `row_stride` apart; ids and weights [N, K], an id outside [0, X) for none.
  const float* rows;
  long row_stride;
  const int32_t* ids;
  const float* weights;
  long N, K;
  float* out;  // [N, D]; with `apart` [N, K, D], the terms of each sum, zero for none
  int threads;
  long pieces;  // of each sum over F (a power of two, at most 8): as many as this rank has of the 8 that the whole width has
  bool apart;
  long fp4_block = 0;
  bool integers = false;
  // Of each matrix of an expert in NVFP4, [layers, X, 2] and [layers, X]; null for 1.
  const float* gate_up_whole = nullptr;
  const float* down_whole = nullptr;
  // What hidden values are rounded to before they are multiplied with `down`; with `powers`, FP8's scales are powers of two.
  Hidden hidden_format = Hidden::float32;
  bool powers = false;
  float limit = 0;  // what the gate is clipped to from above, and up on both sides; 0: neither is
  // Where each row lies, and where each sum goes, in the place of `rows` and `out`; null: as said above. For K = 1 alone.
  const float* const* row_at = nullptr;
  float* const* out_at = nullptr;

  // Bytes of working memory that `run` needs, aligned to 64.
  size_t scratch_bytes() const { return layout(nullptr).scratch.bytes(); }

  void run(char* scratch, const Schedule& schedule) const {
    const Layout at = layout(scratch);
    const int rounds = sort_pairs(at);
    const long strips = (D + strip() - 1) / strip();
    Phases::run(
        2 * rounds,
        [&](int phase) {
          const long chunks = at.round[phase / 2 + 1].chunk - at.round[phase / 2].chunk;
          return phase % 2 ? strips : chunks * hidden_strips(chunks);
        },
        [&](int phase, long item, int worker) {
          const Round &first = at.round[phase / 2], &last = at.round[phase / 2 + 1];
          if (phase % 2 == 0) {
            const long parts = hidden_strips(last.chunk - first.chunk), width = hidden_width(parts);
            return hidden(at, first, first.chunk + item / parts, item % parts * width, width, worker);
          }
          results(at, first, last, item * strip(), std::min(D, (item + 1) * strip()), worker);
        },
        threads, schedule);
  }

 private:
  struct Chunk {
    int32_t expert, first, count;
  };
  // Where a round begins: its first row, chunk and pair.
  struct Round {
    long row, chunk, pair;
  };
  struct Layout {
    const Experts& of;
    Scratch scratch;
    int32_t* start = scratch.take<int32_t>(of.X + 2);       // of a round's pairs, where each expert's are
    int32_t* row = scratch.take<int32_t>(of.pairs());       // by round, expert, row
    float* weight = scratch.take<float>(of.pairs());
    int32_t* choice = scratch.take<int32_t>(of.pairs());    // which of its row's K choices a pair is
    int32_t* place = scratch.take<int32_t>(of.pairs());     // [N, K]: where a choice's pair stands, -1 for none
    Chunk* chunk = scratch.take<Chunk>(of.rounds() * std::min(of.X, of.pairs_of_a_round()) + of.pairs() / kChunkRows + 1);
    Round* round = scratch.take<Round>(of.rounds() + 1);
    float* hidden = scratch.take<float>(of.pairs_of_a_round() * of.F);
    // Of each worker: gate and up [kChunkRows, 2F] or terms [pairs of a round, strip], and what products need.
    long own_floats = std::max(kChunkRows * 2 * of.F, of.sums_apart() ? of.pairs_of_a_round() * of.strip() : 0);
    size_t own_bytes = sizeof(float) * ((own_floats + 15) / 16 * 16 + product_floats());
    char* own = scratch.take<char>(own_bytes * std::max(of.threads, 1));
  };
  Layout layout(char* base) const { return {*this, Scratch(base)}; }

  long pairs() const { return N * K; }
  long rows_of_a_round() const { return std::max<long>(1, kRoundPairs / std::max<long>(1, K)); }
  long rounds() const { return (N + rows_of_a_round() - 1) / rows_of_a_round(); }
  long pairs_of_a_round() const { return std::min(N, rows_of_a_round()) * K; }
  // Width of one of so many equal parts of some columns, in whole strips.
  static long in_strips(long columns, long parts, long strip = kStrip) {
    return std::max(strip, ((columns + parts - 1) / parts + strip - 1) / strip * strip);
  }
  // The same of hidden values: in whole blocks where a block is rounded together, which in NVFP4 all of a row is.
  long hidden_width(long parts) const {
    return in_strips(F, parts, hidden_format == Hidden::nvfp4 ? F : hidden_format == Hidden::fp8 ? kRoundedTogether : kStrip);
  }
  // Into how many parts a chunk's hidden values are cut, so that all threads have some of few chunks.
  long hidden_strips(long chunks) const {
    const long wanted = chunks == 0 || threads <= 1 ? 1 : (2 * threads + chunks - 1) / chunks;
    return (F + hidden_width(wanted) - 1) / hidden_width(wanted);
  }
  // Columns of the result that are computed at once: more where the matrix is widened by panels, or read as it streams by.
  long strip() const {
    if (!by_panels(D)) return kStrip;
    return pairs() > kFewPairs ? kPanelWidth : std::min(kStreamColumns, in_strips(D, threads <= 1 ? 1 : 2 * threads));
  }
  bool by_panels(long stride) const { return stride * bytes > 2048; }
  bool sums_apart() const { return !apart && K > 1; }

  // The pairs by round, expert and row, and cut into chunks of one expert. Returns the number of rounds that have any.
  int sort_pairs(const Layout& at) const {
    std::fill(at.place, at.place + pairs(), -1);
    long chunk = 0, pair = 0;
    int round = 0;
    at.round[0] = {0, 0, 0};
    for (long row = 0; row < N; row += rows_of_a_round()) {
      const long end = std::min(N, row + rows_of_a_round());
      std::fill(at.start, at.start + X + 2, 0);
      for (long p = row * K; p < end * K; p++)
        if (0 <= ids[p] && ids[p] < X) at.start[ids[p] + 2]++;
      for (long x = 2; x < X + 2; x++) at.start[x] += at.start[x - 1];
      // start[x + 1] is where expert x's next pair goes, and after the loop where its pairs end.
      for (long n = row; n < end; n++)
        for (long k = 0; k < K; k++) {
          const int32_t x = ids[n * K + k];
          if (x < 0 || x >= X) continue;
          const long place = pair + at.start[x + 1]++;
          at.row[place] = static_cast<int32_t>(n);
          at.choice[place] = static_cast<int32_t>(k);
          at.weight[place] = weights[n * K + k];
          at.place[n * K + k] = static_cast<int32_t>(place);
        }
      for (long x = 0; x < X; x++)
        for (int32_t first = at.start[x]; first < at.start[x + 1]; first += kChunkRows)
          at.chunk[chunk++] = {static_cast<int32_t>(x), static_cast<int32_t>(pair + first), std::min<int32_t>(kChunkRows, at.start[x + 1] - first)};
      pair += at.start[X];
      at.round[++round] = {end, chunk, pair};
    }
    return round;
  }

  // Hidden values of a chunk's rows, `width` columns from `from` on: weight * silu(x W_gate) * (x W_up).
  void hidden(const Layout& at, const Round& round, long index, long from, long width, int worker) const {
    const Chunk& chunk = at.chunk[index];
    const long columns = std::min(F - from, width);
    float* both = reinterpret_cast<float*>(at.own + at.own_bytes * worker);
    const float* a[kChunkRows];
    float* c[kChunkRows];
    for (int32_t r = 0; r < chunk.count; r++) {
      const long row = at.row[chunk.first + r];
      a[r] = row_at ? row_at[row] : rows + row * row_stride;
      c[r] = both + r * 2 * columns;
    }
    const long expert = layer * X + chunk.expert;
    for (long part = 0; part < 2; part++)
      with_matrix(gate_up, gate_up_scale, expert, D, F, 2, part, [&](const auto& b) {
        through(chunk.count, a, b, from, from + columns, D, c, product_memory(at, worker), part * columns - from, D);
      });
    const float whole_gate = gate_up_whole ? gate_up_whole[2 * expert] : 1.0f, whole_up = gate_up_whole ? gate_up_whole[2 * expert + 1] : 1.0f;
    const float whole_down = down_whole ? down_whole[expert] : 1.0f, whole = whole_up * whole_down;
    float* to = at.hidden + (chunk.first - round.pair) * F + from;
    for (int32_t r = 0; r < chunk.count; r++, to += F) {
      const float weight = at.weight[chunk.first + r];
      // What is clipped has the scale of its matrix before; else that is a factor of the result.
      const float after = hidden_format == Hidden::float32 ? (limit ? whole_down : whole) * weight : limit ? 1.0f : whole_up;
      swiglu(c[r], columns, whole_gate, limit ? whole_up : 1.0f, after, to);
      if (hidden_format == Hidden::fp8) round_to_fp8(to, columns, powers, whole_down * weight);
      if (hidden_format == Hidden::nvfp4) round_to_nvfp4(to, columns, whole_down * weight);
    }
  }

  // As dsjax/kernels/gate.py.
  Vec gated(Vec gate, Vec up) const {
    if (limit) {
      gate = gate > limit ? broadcast(limit) : gate;
      up = up > limit ? broadcast(limit) : up < -limit ? broadcast(-limit) : up;
    }
    return gate / (exp(-gate) + 1.0f) * up;
  }

  void swiglu(const float* both, long columns, float whole_gate, float whole_up, float weight, float* to) const {
    const float* up = both + columns;
    long f = 0;
    for (; f + kLanes <= columns; f += kLanes) store(to + f, gated(load(both + f) * whole_gate, load(up + f) * whole_up) * weight);
    for (; f < columns; f++) to[f] = gated(broadcast(both[f] * whole_gate), broadcast(up[f] * whole_up))[0] * weight;
  }

  // Where a row's sum goes, or the term of one of its choices.
  float* own_out(long row, long choice) const { return out_at ? out_at[row] : out + (row * (apart ? K : 1) + (apart ? choice : 0)) * D; }

  // Columns [from, to) of a round's results: the terms of all its pairs, and then each row's sum of them.
  void results(const Layout& at, const Round& first, const Round& last, long from, long to, int worker) const {
    float* terms = reinterpret_cast<float*>(at.own + at.own_bytes * worker);
    const float* a[kChunkRows];
    float* c[kChunkRows];
    for (long index = first.chunk; index < last.chunk; index++) {
      const Chunk& chunk = at.chunk[index];
      for (int32_t r = 0; r < chunk.count; r++) {
        const long pair = chunk.first + r;
        a[r] = at.hidden + (pair - first.pair) * F;
        c[r] = sums_apart() ? terms + (pair - first.pair) * strip() : own_out(at.row[pair], at.choice[pair]) + from;
      }
      with_matrix(down, down_scale, layer * X + chunk.expert, F, D, 1, 0, [&](const auto& b) {
        through(chunk.count, a, b, from, to, F, c, product_memory(at, worker), -from, F / pieces);
      });
    }
    for (long n = first.row; n < last.row; n++) {
      float* row = own_out(n, 0);
      const int32_t* place = at.place + n * K;
      if (sums_apart()) {
        const auto term = [&](long k) { return place[k] < 0 ? nullptr : terms + (place[k] - first.pair) * strip(); };
        add_in_order(K, term, to - from, row + from);
        continue;
      }
      for (long k = 0; k < K; k++)
        if (place[k] < 0) std::fill(row + k * D + from, row + k * D + to, 0.0f);
    }
  }

  static long product_floats() { return (std::max(Panels::floats(kChunkRows, true), Stream::floats(kStreamRows)) + 15) / 16 * 16; }
  float* product_memory(const Layout& at, int worker) const {
    return reinterpret_cast<float*>(at.own + at.own_bytes * (worker + 1)) - product_floats();
  }

  // Uses one part, of `parts`, of an expert's matrix, `width` columns wide.
  template <class Use>
  void with_matrix(const void* data, const void* scale, long expert, long depth, long width, long parts, long part, Use use) const {
    if (fp4_block) {
      const long size = depth * parts * width, stride = parts * width;
      const uint8_t* bytes = static_cast<const uint8_t*>(data) + expert * size / 2 + part * width;
      const long scales = expert * size / fp4_block + part * width;
      if (integers) return use(Int4{bytes, static_cast<const uint16_t*>(scale) + scales, stride, fp4_block});
      return use(Fp4{bytes, static_cast<const uint8_t*>(scale) + scales, stride, fp4_block});
    }
    if (bytes == 4) return use(part_of<Float32>(data, scale, expert, depth, parts, part, width));
    if (bytes == 2) return use(part_of<BFloat16>(data, scale, expert, depth, parts, part, width));
    use(part_of<Float8>(data, scale, expert, depth, parts, part, width));
  }

  // The product with columns [from, to) of a weight matrix: in place (not in FP8), as it streams by, or by panels. All give the same bits.
  template <class B>
  void through(long count, const float* const* a, const B& b, long from, long to, long depth, float* const* c, float* memory, long c_shift,
               long piece) const {
    if constexpr (!B::scaled)
      if (!by_panels(b.stride)) return place_product(count, a, b, from, to, depth, c, c_shift, piece);
    if (count <= kStreamRows) return stream_product(memory, kStreamRows, count, a, b, from, to, depth, c, c_shift, piece);
    panel_product(memory, kChunkRows, count, a, b, from, to, depth, c, c_shift, piece);
  }
};

extern template void run_kernel(const Experts&, char*, const Schedule&);

}  // namespace dsjax
