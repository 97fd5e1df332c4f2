// The routed experts' product of one rank: out[n] = sum_k weight[n, k] * Expert_{id[n, k]}(row[n]), SwiGLU experts.
#pragma once

#include <algorithm>

#include "phases.h"
#include "product.h"

namespace dsjax {

constexpr long kChunkRows = 48;    // rows of an expert that one item takes
constexpr long kRoundRows = 4096;  // (row, expert) pairs whose hidden values are kept at once
constexpr long kPanelDepth = 128, kPanelWidth = 256;  // of a weight matrix that is too wide to be read in strips

struct Experts {
  // Weights: gate and up [layers, X, D, 2, F], down [layers, X, F, D]; `bytes` of an element: 4 float32, 2 bfloat16, 1 FP8 with
  // scales [layers, X, D/128, 2, F/128] and [layers, X, F/128, D/128].
  const void* gate_up;
  const void* down;
  const float* gate_up_scale;
  const float* down_scale;
  int bytes;
  long layer, X, D, F;
  // Rows [N, D] in rows `row_stride` apart; ids and weights [N, K], an id outside [0, X) for none.
  const float* rows;
  long row_stride;
  const int32_t* ids;
  const float* weights;
  long N, K;
  float* out;  // [N, D]
  int threads;

  // Bytes of working memory that `run` needs, aligned to 64.
  size_t scratch_bytes() const { return layout(nullptr).total; }

  void run(char* scratch, const Schedule& schedule) const {
    const Layout at = layout(scratch);
    sort_pairs(at);
    for (long n = 0; n < N; n++) std::fill(out + n * D, out + (n + 1) * D, 0.0f);
    const long chunks = cut_into_chunks(at);
    if (chunks == 0) return;
    // Rounds of chunks; of each, first all hidden values, then all columns of the result.
    int rounds = 0;
    for (long c = 0; c < chunks; rounds++) c = round_end(at, c, chunks, rounds);
    const long pieces = threads > 1 ? std::min<long>(2 * threads, std::max<long>(1, D / (4 * kLanes))) : 1;
    Phases::run(
        2 * rounds,
        [&](int phase) { return phase % 2 ? pieces : at.round[phase / 2 + 1] - at.round[phase / 2]; },
        [&](int phase, long item, int worker) {
          const long first = at.round[phase / 2], last = at.round[phase / 2 + 1];
          if (phase % 2 == 0) return hidden(at, first + item, first, worker);
          const long step = (D / pieces + 4 * kLanes - 1) / (4 * kLanes) * (4 * kLanes);
          const long from = std::min(D, item * step), to = item == pieces - 1 ? D : std::min(D, from + step);
          if (from < to) results(at, first, last, from, to, worker);
        },
        threads, schedule);
  }

 private:
  struct Chunk {
    int32_t expert, first, count;
  };
  struct Layout {
    int32_t* start;   // [X + 1], then counts as pairs are placed
    int32_t* row;     // [P] sorted by expert, then row
    float* weight;    // [P]
    Chunk* chunk;     // [X + P / kChunkRows]
    int32_t* round;   // first chunk of each round
    float* hidden;    // [kRoundRows at most, F]
    char* own;        // of each worker: gate and up [kChunkRows, 2F], a panel, pointers
    size_t own_bytes, total;
  };

  long pairs() const { return N * K; }
  long kept_rows() const { return std::min(pairs(), kRoundRows + kChunkRows); }
  long most_chunks() const { return std::min(X, pairs()) + pairs() / kChunkRows + 1; }

  Layout layout(char* base) const {
    size_t used = 0;
    auto take = [&](size_t size) {
      char* found = base ? base + used : nullptr;
      used += (size + 63) / 64 * 64;
      return found;
    };
    Layout at;
    at.start = reinterpret_cast<int32_t*>(take(4 * (X + 2)));
    at.row = reinterpret_cast<int32_t*>(take(4 * pairs()));
    at.weight = reinterpret_cast<float*>(take(4 * pairs()));
    at.chunk = reinterpret_cast<Chunk*>(take(sizeof(Chunk) * most_chunks()));
    at.round = reinterpret_cast<int32_t*>(take(4 * (most_chunks() + 2)));
    at.hidden = reinterpret_cast<float*>(take(4 * kept_rows() * F));
    at.own_bytes = 4 * kChunkRows * 2 * F + 4 * kPanelDepth * kPanelWidth + 2 * sizeof(void*) * kChunkRows;
    at.own_bytes = (at.own_bytes + 63) / 64 * 64;
    at.own = take(at.own_bytes * std::max(threads, 1));
    at.total = used;
    return at;
  }

  void sort_pairs(const Layout& at) const {
    std::fill(at.start, at.start + X + 2, 0);
    for (long p = 0; p < pairs(); p++)
      if (0 <= ids[p] && ids[p] < X) at.start[ids[p] + 2]++;
    for (long x = 2; x < X + 2; x++) at.start[x] += at.start[x - 1];
    // start[x + 1] is where expert x's next pair goes, and after the loop where its pairs end.
    for (long n = 0; n < N; n++)
      for (long p = n * K; p < (n + 1) * K; p++)
        if (0 <= ids[p] && ids[p] < X) {
          const int32_t place = at.start[ids[p] + 1]++;
          at.row[place] = static_cast<int32_t>(n);
          at.weight[place] = weights[p];
        }
  }

  long cut_into_chunks(const Layout& at) const {
    long chunks = 0;
    for (long x = 0; x < X; x++)
      for (int32_t first = at.start[x]; first < at.start[x + 1]; first += kChunkRows)
        at.chunk[chunks++] = {static_cast<int32_t>(x), first, std::min<int32_t>(kChunkRows, at.start[x + 1] - first)};
    return chunks;
  }

  long round_end(const Layout& at, long first, long chunks, int round) const {
    long last = first, rows = 0;
    while (last < chunks && rows < kRoundRows) rows += at.chunk[last++].count;
    at.round[round] = static_cast<int32_t>(first);
    at.round[round + 1] = static_cast<int32_t>(last);
    return last;
  }

  // Hidden values of a chunk's rows: weight * silu(x W_gate) * (x W_up).
  void hidden(const Layout& at, long index, long first_of_round, int worker) const {
    const Chunk& chunk = at.chunk[index];
    char* own = at.own + at.own_bytes * worker;
    float* both = reinterpret_cast<float*>(own);
    float* panel = both + kChunkRows * 2 * F;
    const float** a = reinterpret_cast<const float**>(panel + kPanelDepth * kPanelWidth);
    float** c = const_cast<float**>(a + kChunkRows);
    for (int32_t r = 0; r < chunk.count; r++) {
      a[r] = rows + at.row[chunk.first + r] * row_stride;
      c[r] = both + r * 2 * F;
    }
    const long expert = layer * X + chunk.expert;
    with_matrix(gate_up, gate_up_scale, expert, D, F, 2, [&](const auto& b) {
      // Gate and up by themselves: with FP8 each has scales of its own.
      through(chunk.count, a, b, 0, F, D, c, panel, false);
      through(chunk.count, a, b, F, 2 * F, D, c, panel, false);
    });
    float* to = at.hidden + (chunk.first - at.chunk[first_of_round].first) * F;
    for (int32_t r = 0; r < chunk.count; r++, to += F) swiglu(c[r], at.weight[chunk.first + r], to);
  }

  void swiglu(const float* both, float weight, float* to) const {
    long f = 0;
    for (; f + kLanes <= F; f += kLanes) {
      Vec gate = load(both + f), up = load(both + F + f);
      store(to + f, gate / (exp(-gate) + 1.0f) * up * weight);
    }
    for (; f < F; f++) {
      Vec gate = broadcast(both[f]);
      to[f] = (gate / (exp(-gate) + 1.0f))[0] * both[F + f] * weight;
    }
  }

  // Columns [from, to) of the result: experts in order, so that a row's sum has one order whatever the threads.
  void results(const Layout& at, long first, long last, long from, long to, int worker) const {
    char* own = at.own + at.own_bytes * worker;
    float* panel = reinterpret_cast<float*>(own) + kChunkRows * 2 * F;
    const float** a = reinterpret_cast<const float**>(panel + kPanelDepth * kPanelWidth);
    float** c = const_cast<float**>(a + kChunkRows);
    for (long index = first; index < last; index++) {
      const Chunk& chunk = at.chunk[index];
      const float* hidden = at.hidden + (chunk.first - at.chunk[first].first) * F;
      for (int32_t r = 0; r < chunk.count; r++) {
        a[r] = hidden + r * F;
        c[r] = out + at.row[chunk.first + r] * D;
      }
      with_matrix(down, down_scale, layer * X + chunk.expert, F, D, 1, [&](const auto& b) {
        through(chunk.count, a, b, from, to, F, c, panel, true);
      });
    }
  }

  template <class Use>
  void with_matrix(const void* data, const float* scale, long expert, long depth, long width, long parts, Use use) const {
    const long size = depth * parts * width, stride = parts * width;
    if (bytes == 4) return use(Matrix<Float32>{static_cast<const float*>(data) + expert * size, stride});
    if (bytes == 2) return use(Matrix<BFloat16>{static_cast<const uint16_t*>(data) + expert * size, stride});
    const long blocks = (width + kScaleBlock - 1) / kScaleBlock;
    const long scales = (depth + kScaleBlock - 1) / kScaleBlock * parts * blocks;
    use(Scaled{static_cast<const uint8_t*>(data) + expert * size, stride, scale + expert * scales, parts, width, blocks});
  }

  // The product with columns [from, to) of a weight matrix. One whose rows lie far apart is first widened, a panel at a time, into
  // strips that lie together: read in place, each line of a strip would be on a page of its own.
  template <class B>
  void through(long count, const float* const* a, const B& b, long from, long to, long depth, float* const* c, float* panel,
               bool add) const {
    if (b.stride * bytes <= 2048) return product(count, a, 1, b, from, to, depth, c, add);
    constexpr long strip = 4 * kLanes;
    const float* part[kChunkRows];
    for (long k = 0; k < depth; k += kPanelDepth) {
      const long deep = std::min(kPanelDepth, depth - k);
      for (long r = 0; r < count; r++) part[r] = a[r] + k;
      for (long j = from; j < to; j += kPanelWidth) {
        const long wide = std::min(kPanelWidth, to - j), whole = wide / strip * strip;
        for (long d = 0; d < deep; d++)
          for (long s = 0; s < whole; s += strip)
            for (long v = 0; v < strip; v += kLanes) store(panel + s * kPanelDepth + d * strip + v, b.at(k + d, j + s + v));
        for (long s = 0; s < whole; s += strip)
          product(count, part, 1, Matrix<Float32>{panel + s * kPanelDepth, strip}, 0, strip, deep, c, add || k > 0, j + s);
        if (whole < wide) product(count, part, 1, From<B>{b, k}, j + whole, j + wide, deep, c, add || k > 0);
      }
    }
  }

  // A matrix from one of its rows on.
  template <class B>
  struct From {
    const B& b;
    long first;
    static constexpr bool mixes_pairs = B::mixes_pairs;
    void pair(long k, long column, Vec& one, Vec& two) const { b.pair(first + k, column, one, two); }
    Vec at(long k, long column) const { return b.at(first + k, column); }
    float one(long k, long column) const { return b.one(first + k, column); }
  };
};

}  // namespace dsjax
