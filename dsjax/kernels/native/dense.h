// Rows times one layer's matrix, read where it lies in the stack of layers. A row's result depends on that row and the matrix alone: not on
// the other rows, the threads, or which of the matrix's columns this device has (docs/exactness.md).
#pragma once

#include <algorithm>
#include <vector>

#include "phases.h"
#include "products.h"

namespace dsjax {

constexpr long kNear = 2048;           // floats from a matrix's row to the next, up to which panels would cost more than they save
constexpr long kLeastInPlace = 4;      // rows from which such a matrix is read in place, and not as it streams by

struct Dense {
  // [layers, K, parts * width]; `bytes` of an element: 4 float32, 2 bfloat16, 1 FP8 with scales [layers, K/128, parts, width/128].
  // Transposed: [layers, width, K], not in FP8.
  const void* weight;
  const float* scale;
  int bytes;
  bool transposed;
  long layer, K, parts, width;
  long pieces;  // of each sum over K (a power of two, at most 8): 1 where no mesh cuts K
  const float* x;  // [N, K]; grouped [N, parts, K], of which each part of the matrix multiplies its own
  long N;
  float* out;  // [N, parts * width]
  int threads;
  bool grouped = false;

  size_t scratch_bytes() const { return own_floats() * sizeof(float) * std::max(threads, 1); }

  // Rows of zeros, as those of padding are, give zeros, and read nothing of the matrix.
  void run(char* scratch, const Schedule& schedule) const {
    std::vector<long> filled;
    for (long n = 0; n < N; n++) {
      if (is_filled(x + n * row())) filled.push_back(n);
      else std::fill(out + n * parts * width, out + (n + 1) * parts * width, 0.0f);
    }
    const long all = static_cast<long>(filled.size());
    if (all == 0) return;
    const bool alone = threads <= 1 || all * K * parts * width < kLeastWork;
    const long rows = streams() ? all : std::min(all, Panels::kMostRows), row_items = (all + rows - 1) / rows;
    long step = streams() ? kStreamColumns : kPanelWidth;
    if (!alone) step = std::min(step, columns_of_an_item((2 * threads + row_items - 1) / row_items));
    const long of_part = (width + step - 1) / step, columns = parts * of_part;
    Phases::run(
        1, [&](int) { return row_items * columns; },
        [&](int, long item, int worker) {
          const long first = item / columns * rows, count = std::min(rows, all - first), part = item % columns / of_part;
          const long from = item % of_part * step, to = std::min(width, from + step);
          float* own = reinterpret_cast<float*>(scratch) + worker * own_floats();
          const float* a[Panels::kMostRows];
          float* c[Panels::kMostRows];
          for (long r = 0; r < count; r++) {
            const long n = filled[first + r];
            a[r] = x + n * row() + (grouped ? part * K : 0), c[r] = out + n * parts * width + part * width;
          }
          auto along = [&](auto format) {
            typedef decltype(format) Format;
            const Transposed<Format> b{static_cast<const typename Format::Stored*>(weight) + layer * K * width, K};
            panel_product(own, rows, count, a, b, from, to, K, c, 0, K / pieces);
          };
          if (transposed) return bytes == 4 ? along(Float32()) : along(BFloat16());
          if (bytes == 4) some<Float32>(count, a, c, part, from, to, own);
          if (bytes == 2) some<BFloat16>(count, a, c, part, from, to, own);
          if (bytes == 1) some<Float8>(count, a, c, part, from, to, own);
        },
        alone ? 1 : threads, schedule);
  }

 private:
  // Columns of each of about `wanted` items: of whole strips; and half as many items, where the thread with most to do has less of those:
  // three items of 192 columns would leave two threads 384 and 192, and two of 320 and 256 do not.
  long columns_of_an_item(long wanted) const {
    const long strips = (parts * width + kStrip - 1) / kStrip;
    auto each = [&](long items) { return (strips + items - 1) / items; };
    auto most = [&](long items) { return ((strips + each(items) - 1) / each(items) + threads - 1) / threads * each(items); };
    const long half = std::max(wanted / 2, 1L);
    return kStrip * each(most(half) < most(wanted) ? half : wanted);
  }

  long row() const { return grouped ? parts * K : K; }

  bool is_filled(const float* values) const {
    for (long k = 0; k < row(); k++)
      if (values[k] != 0) return true;
    return false;
  }

  bool near() const { return bytes == 4 && !transposed && parts * width <= kNear; }
  bool streams() const { return N <= kStreamRows && !transposed && !(near() && N >= kLeastInPlace); }

  long own_floats() const {
    const long panels = Panels::floats(std::min(N, Panels::kMostRows), true);
    return (std::max(panels, N <= kStreamRows ? Stream::floats(N) : 0) + 15) / 16 * 16;
  }

  // The product with columns [from, to) of one part of a layer's matrix.
  template <class Format>
  void some(long count, const float* const* a, float* const* c, long part, long from, long to, float* own) const {
    const Matrix<Format> b = part_of<Format>(weight, scale, layer, K, parts, part, width);
    if (streams()) return stream_product(own, N, count, a, b, from, to, K, c, 0, K / pieces);
    if constexpr (std::is_same_v<Format, Float32>)
      if (near()) return place_product(count, a, b, from, to, K, c, 0, K / pieces);
    panel_product(own, std::min(N, Panels::kMostRows), count, a, b, from, to, K, c, 0, K / pieces);
  }
};

// Root mean square norms: out = scale * (x * 1 / sqrt(mean(x^2) + eps)), each row by itself. With a bias, layer norms: x less its mean in
// the place of x, and the bias added.
struct Norm {
  const float* x;  // [N, width]
  const float* scale;
  long N, width;
  float eps;
  float* out;
  int threads;
  const float* bias = nullptr;

  size_t scratch_bytes() const { return 64; }

  void run(char*, const Schedule& schedule) const {
    Phases::run(
        1, [&](int) { return (N + kTogether - 1) / kTogether; },
        [&](int, long item, int) {
          for (long n = item * kTogether; n < std::min(N, (item + 1) * kTogether); n++) normalise(n);
        },
        N * width < kLeastWork ? 1 : threads, schedule);
  }

 private:
  static constexpr long kTogether = 16;  // rows of an item

  void normalise(long n) const {
    const float* row = x + n * width;
    float* to = out + n * width;
    if (bias) {
      float total = 0;
      for (long i = 0; i < width; i++) total += row[i];
      const float mean = total / static_cast<float>(width);
      for (long i = 0; i < width; i++) to[i] = row[i] - mean;
      row = to;
    }
    const float inverse = inverse_rms(row, width, eps);
    long i = 0;
    for (; i + kLanes <= width; i += kLanes) store(to + i, load(scale + i) * (load(row + i) * inverse));
    for (; i < width; i++) to[i] = scale[i] * (row[i] * inverse);
    for (i = 0; bias && i < width; i++) to[i] += bias[i];
  }
};

extern template void run_kernel(const Dense&, char*, const Schedule&);
extern template void run_kernel(const Norm&, char*, const Schedule&);

}  // namespace dsjax
