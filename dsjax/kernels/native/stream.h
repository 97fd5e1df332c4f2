// Few rows times a matrix that is read once, in order, and widened in registers: what then counts is how fast memory gives its bytes.
#pragma once

#include <algorithm>

#include "panels.h"

namespace dsjax {

constexpr long kStreamRows = 8;       // up to so many rows
constexpr long kStreamColumns = 4096;  // of a strip: the longer it is, the more of memory is read in order
constexpr long kStreamDepth = 8;      // rows of the matrix that are read side by side

class Stream {
 public:
  // Floats of working memory.
  static long floats(long rows) {
    return std::max((kMostLevels + 1) * rows * kStreamColumns, Panels::floats(rows, true));
  }

  Stream(float* scratch, long most_rows) : sums_(scratch), rows_(most_rows) {}

  // As `Panels::product`, with the same order of each sum; at most kStreamRows rows.
  template <class B>
  void product(long rows, const float* const* a, const B& b, long from, long to, long depth, float* const* c, long c_shift, long piece) const {
    if (piece == 0) piece = depth;
    const long whole = from + (to - from) / kGroupColumns * kGroupColumns;
    for (long j = from; j < whole; j += kStreamColumns)
      strip(rows, a, b, j, std::min(kStreamColumns, whole - j), depth, c, c_shift, piece);
    if (whole < to) Panels(sums_, rows_).product(rows, a, b, whole, to, depth, c, c_shift, piece);
  }

 private:
  float* sums(int level, long row) const { return sums_ + (level * rows_ + row) * kStreamColumns; }

  template <class B>
  void strip(long rows, const float* const* a, const B& b, long from, long columns, long depth, float* const* c, long c_shift, long piece) const {
    for (long first = 0, number = 0; first < depth; first += piece, number++) {
      const long end = std::min(first + piece, depth);
      for (long r = 0; r < rows; r++) std::fill(sums(0, r), sums(0, r) + columns, 0.0f);
      for (long k = first; k < end; k += kStreamDepth) {
        const long deep = std::min(kStreamDepth, end - k), ahead = std::min(kStreamDepth, depth - k - deep);
        for (long i = 0; i < columns; i += kGroupColumns) {
          for (long d = 0; d < ahead; d++)
            for (long line = 0; line < kGroupColumns; line += B::line) b.prefetch(k + deep + d, from + i + line);
          // Tiles of equal height.
          const long tiles = (rows + 3) / 4, height = (rows + tiles - 1) / tiles;
          if (B::scaled && tiles > 1) {  // widened once for all tiles
            Vec widened[kStreamDepth][kGroup];
            for (long d = 0; d < deep; d++) b.group(k + d, from + i, widened[d]);
            tiles_of(rows, height, a, Widened{widened, k}, k, deep, from, i);
          } else {
            tiles_of(rows, height, a, b, k, deep, from, i);
          }
        }
      }
      int level = 0;
      for (; number >> level & 1; level++)
        for (long r = 0; r < rows; r++)
          for (long i = 0; i < columns; i += kLanes) store(sums(0, r) + i, load(sums(level + 1, r) + i) + load(sums(0, r) + i));
      for (long r = 0; r < rows && end < depth; r++) std::copy(sums(0, r), sums(0, r) + columns, sums(level + 1, r));
    }
    for (long r = 0; r < rows; r++)
      for (long i = 0; i < columns; i += kGroupColumns) {
        Vec group[kGroup];
        for (int v = 0; v < kGroup; v++) group[v] = load(sums(0, r) + i + v * kLanes);
        B::order(group);
        for (int v = 0; v < kGroup; v++) store(c[r] + from + i + c_shift + v * kLanes, group[v]);
      }
  }

  // A group of columns of the matrix's rows from `first` on, as float32 and with their scales.
  struct Widened {
    const Vec (*rows)[kGroup];
    long first;
    void group(long k, long, Vec (&values)[kGroup]) const {
#pragma GCC unroll 4
      for (int v = 0; v < kGroup; v++) values[v] = rows[k - first][v];
    }
  };

  template <class B>
  void tiles_of(long rows, long height, const float* const* a, const B& b, long k, long deep, long from, long i) const {
    for (long r = 0; r < rows; r += height) switch (std::min(height, rows - r)) {
        case 1: tile<1>(a, b, r, k, deep, from, i); break;
        case 2: tile<2>(a, b, r, k, deep, from, i); break;
        case 3: tile<3>(a, b, r, k, deep, from, i); break;
        default: tile<4>(a, b, r, k, deep, from, i); break;
      }
  }

  // Goes on with the sums of one group of columns and `rows` rows, over `deep` rows of the matrix.
  template <int rows, class B>
  void tile(const float* const* a, const B& b, long r, long k, long deep, long from, long i) const {
    Vec total[rows][kGroup];
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
      for (int v = 0; v < kGroup; v++) total[row][v] = load(sums(0, r + row) + i + v * kLanes);
    for (long d = 0; d < deep; d++) {
      Vec w[kGroup];
      b.group(k + d, from + i, w);
#pragma GCC unroll 4
      for (int v = 0; v < kGroup; v++) pin(w[v]);
#pragma GCC unroll 4
      for (int row = 0; row < rows; row++) {
        const Vec x = broadcast(a[r + row][k + d]);
#pragma GCC unroll 4
        for (int v = 0; v < kGroup; v++) total[row][v] += x * w[v];
      }
    }
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
      for (int v = 0; v < kGroup; v++) store(sums(0, r + row) + i + v * kLanes, total[row][v]);
  }

  float* sums_;
  long rows_;
};

}  // namespace dsjax
