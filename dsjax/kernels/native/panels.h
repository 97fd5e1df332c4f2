// Products with a matrix whose rows lie far apart, or that is stored in few bits: it is widened, a panel at a time, into strips that
// lie together. Read in place, each line of a strip would be on a page of its own, and each value would be widened for every tile.
#pragma once

#include <algorithm>

#include "product.h"

namespace dsjax {

constexpr long kStrip = 4 * kLanes;                                // columns that a tile takes
constexpr long kPanelDepth = 64, kPanelWidth = 16 * kLanes;
constexpr long kRun = 8;  // rows of a matrix of which a group of columns is widened one after the other

// B as columns that lie together: element (k, column) is data[column * stride + k].
template <class Format>
struct Transposed {
  const typename Format::Stored* data;
  long stride;
  Vec of(long column, long k) const { return Format::widen(data + column * stride + k); }  // k and those behind it
  float one(long k, long column) const { return Format::widen_one(data[column * stride + k]); }
};
template <class B>
constexpr bool lies_transposed = false;
template <class Format>
constexpr bool lies_transposed<Transposed<Format>> = true;

class Panels {
 public:
  // Floats of working memory for products of so many rows, whose sums have pieces or not.
  static long floats(long rows, bool pieces) { return kPanelDepth * kPanelWidth + (pieces ? kMostLevels + 1 : 1) * rows * kPanelWidth; }

  Panels(float* scratch, long most_rows) : panel_(scratch), sums_(scratch + kPanelDepth * kPanelWidth), rows_(most_rows) {}

  // c[r][j + c_shift] = sum over k < depth of a[r][k] * b(k, j), for from <= j < to; `piece` as of `product`. At most `most_rows` rows, and
  // at most kMostRows.
  template <class B>
  void product(long rows, const float* const* a, const B& b, long from, long to, long depth, float* const* c, long c_shift, long piece) const {
    if (piece == 0) piece = depth;
    for (long j = from; j < to; j += kPanelWidth) {
      const long wide = std::min(kPanelWidth, to - j);
      // Columns that do not fill a vector are computed with zeros behind them, beside C.
      const bool in_place = piece == depth && wide % kLanes == 0;
      long number = 0;
      for (long first = 0; first < depth; first += piece, number++) {
        const long end = std::min(first + piece, depth);
        float* own[kMostRows];
        for (long r = 0; r < rows; r++) own[r] = in_place ? c[r] + j + c_shift : sums(0) + r * kPanelWidth;
        one_piece(rows, a, b, j, wide, first, end, depth, own);
        if (in_place) continue;
        int level = 0;
        for (; number >> level & 1; level++) add_row(sums(level + 1), rows * kPanelWidth, sums(0));
        if (end < depth) std::copy(sums(0), sums(0) + rows * kPanelWidth, sums(level + 1));
      }
      if (!in_place)
        for (long r = 0; r < rows; r++) std::copy(sums(0) + r * kPanelWidth, sums(0) + r * kPanelWidth + wide, c[r] + j + c_shift);
    }
  }

  static constexpr long kMostRows = 96;

 private:
  float* sums(int level) const { return sums_ + level * rows_ * kPanelWidth; }

  template <class B>
  void one_piece(long rows, const float* const* a, const B& b, long j, long wide, long first, long end, long depth, float* const* to) const {
    const float* part[kMostRows];
    for (long k = first; k < end; k += kPanelDepth) {
      const long deep = std::min(kPanelDepth, end - k);
      for (long r = 0; r < rows; r++) part[r] = a[r] + k;
      fill(b, k, deep, depth, j, wide);
      for (long s = 0; s < wide; s += kStrip) {
        const long columns = (std::min(kStrip, wide - s) + kLanes - 1) / kLanes * kLanes;
        const Matrix<Float32> strip{panel_ + s * kPanelDepth, kStrip};
        dsjax::product(rows, part, 1, strip, 0, columns, deep, to, k == first ? Sums::replace : Sums::go_on, s);
      }
    }
  }

  // Element (d, i) of a panel: strips lie one after the other.
  static float* at(float* panel, long d, long i) { return panel + i / kStrip * kStrip * kPanelDepth + d * kStrip + i % kStrip; }

  // The panel's element (d, i) = b(k + d, column + i) for i < columns, zero up to a whole vector; row by row, as B lies. Asks memory for
  // the next panel, down to `depth`, which then comes while this one is multiplied.
  template <class B>
  void fill(const B& from, long k, long deep, long depth, long column, long columns) const {
    const B b = from;  // copies, which stores cannot have changed
    float* const panel = panel_;
    const long whole = columns / kLanes * kLanes;
    if constexpr (lies_transposed<B>) {
      for (long i = 0; i < whole; i += kLanes) {
        long d = 0;
        for (; d + kLanes <= deep; d += kLanes) {
          Vec square[kLanes];
          for (int lane = 0; lane < kLanes; lane++) square[lane] = b.of(column + i + lane, k + d);
          transpose(square);
          for (int lane = 0; lane < kLanes; lane++) store(at(panel, d + lane, i), square[lane]);
        }
        for (; d < deep; d++)
          for (long lane = 0; lane < kLanes; lane++) at(panel, d, i)[lane] = b.one(k + d, column + i + lane);
      }
    } else {
      const long ahead = k + kPanelDepth + deep <= depth ? kPanelDepth : 0, grouped = B::scaled ? whole / kGroupColumns * kGroupColumns : 0;
      for (long d = 0, next; d < deep; d = next) {
        next = b.alike(k + d, std::min(k + d + kRun, k + deep)) - k;
        for (long r = d; ahead && r < next; r += B::rows_of_a_byte)
          for (long line = 0; line < whole; line += B::line) b.prefetch(k + ahead + r, column + line);
        for (long i = 0; i < grouped; i += kGroupColumns) {
          const typename B::Factors factors = b.factors(k + d, column + i);
          for (long r = d; r < next; r++) {
            Vec group[kGroup];
            b.group(k + r, column + i, factors, group);
            B::order(group);
            DSJAX_EACH(v, kGroup) store(at(panel, r, i + v * kLanes), group[v]);
          }
        }
        for (long r = d; r < next; r++)
          for (long i = grouped; i < whole; i += kLanes) store(at(panel, r, i), b.at(k + r, column + i));
      }
    }
    if (whole < columns)
      for (long d = 0; d < deep; d++)
        for (long i = whole; i < whole + kLanes; i++) *at(panel, d, i) = i < columns ? b.one(k + d, column + i) : 0.0f;
  }

  float *panel_, *sums_;
  long rows_;
};

}  // namespace dsjax
