// Few rows times a matrix that is read once, in order, and widened in registers: what then counts is how fast memory gives its bytes.
#pragma once

#include <algorithm>

#include "panels.h"

namespace dsjax {

constexpr long kStreamRows = 8;       // up to so many rows
constexpr long kStreamColumns = 4096;  // of a strip: the longer it is, the more of memory is read in order
constexpr long kStreamDepth = 8;       // rows of a matrix's bytes that are read side by side
constexpr long kAheadBytes = 32 << 10;  // from what is read to what memory is asked for: what comes while the first of them is waited for

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
    for (long j = from; j < whole; j += kStreamColumns) {
      const long columns = std::min(kStreamColumns, whole - j);
      if (!strip(rows, a, b, j, columns, depth, c, c_shift, piece))
        Panels(sums_, rows_).product(rows, a, b, j, j + columns, depth, c, c_shift, piece);
    }
    if (whole < to) Panels(sums_, rows_).product(rows, a, b, whole, to, depth, c, c_shift, piece);
  }

 private:
  template <class B>
  static constexpr long kDepth = kStreamDepth * B::rows_of_a_byte;

  float* sums(int level, long row) const { return sums_ + (level * rows_ + row) * kStreamColumns; }

  // Whether the widening was right for all codes.
  template <class B>
  bool strip(long rows, const float* const* a, const B& b, long from, long columns, long depth, float* const* c, long c_shift, long piece) const {
    // Rows of the matrix between one that is read and that which is asked for: in a narrow strip many.
    const long bytes = columns * 64 / B::line * kDepth<B> / B::rows_of_a_byte, far = std::max(kAheadBytes / bytes, 1L) * kDepth<B>;
    typename B::Codes codes;
    for (long first = 0, number = 0; first < depth; first += piece, number++) {
      const long end = std::min(first + piece, depth);
      for (long r = 0; r < rows; r++) std::fill(sums(0, r), sums(0, r) + columns, 0.0f);
      for (long k = first, next; k < end; k = next) {
        next = b.alike(k, std::min(k + kDepth<B>, end));
        const long ahead = std::min(next + far, depth);
        for (long i = 0; i < columns; i += kGroupColumns) {
          if (i % B::line == 0 || kGroupColumns > B::line)
            for (long d = k + far; d < ahead; d += B::rows_of_a_byte)
              for (long line = 0; line < kGroupColumns; line += B::line) b.prefetch(d, from + i + line);
          group(rows, a, b, k, next, from, i, codes);
        }
      }
      int level = 0;
      for (; number >> level & 1; level++)
        for (long r = 0; r < rows; r++) add_row(sums(level + 1, r), columns, sums(0, r));
      for (long r = 0; r < rows && end < depth; r++) std::copy(sums(0, r), sums(0, r) + columns, sums(level + 1, r));
    }
    if (codes.found()) return false;
    for (long r = 0; r < rows; r++)
      for (long i = 0; i < columns; i += kGroupColumns) {
        Vec group[kGroup];
        for (int v = 0; v < kGroup; v++) group[v] = load(sums(0, r) + i + v * kLanes);
        B::order_quick(group);
        for (int v = 0; v < kGroup; v++) store(c[r] + from + i + c_shift + v * kLanes, group[v]);
      }
    return true;
  }

  // A group of columns of the matrix's rows from `first` on, as float32 and with their scales.
  struct Widened {
    const Vec (*rows)[kGroup];
    long first;
    typedef AnyCode Codes;
    typedef NoTables Factors;
    static constexpr int rows_of_a_byte = 1;
    template <int vectors>
    void quick(long k, int, long column, Factors, Vec (&values)[vectors], Codes&) const {
      DSJAX_EACH(v, vectors) values[v] = rows[k - first][column / kLanes + v];
    }
  };

  // Goes on with the sums of one group of columns, over the matrix's rows from k to `next`.
  template <class B>
  void group(long rows, const float* const* a, const B& b, long k, long next, long from, long i, typename B::Codes& codes) const {
    const typename B::Factors factors = b.quick_factors(k, from + i, codes);
    if (rows == 1) return tile<1, kGroup>(a, b, factors, 0, k, next, from + i, i, codes);
    if constexpr (sizeof(factors) == sizeof(Vec) || kRegisters == 32)  // or registers would not do
      if (rows == 2) return tile<2, kGroup>(a, b, factors, 0, k, next, from + i, i, codes);
    if constexpr (B::scaled) {
      Vec widened[kDepth<B>][kGroup];
      for (long d = k; d < next; d += B::rows_of_a_byte)
        DSJAX_EACH(part, B::rows_of_a_byte) b.quick(d, part, from + i, factors, widened[d + part - k], codes);
      AnyCode any;
      for (int v = 0; v < kGroup; v += kNarrow) tiles(rows, a, Widened{widened, k}, NoTables{}, k, next, v * kLanes, i + v * kLanes, any);
    } else {
      for (int v = 0; v < kGroup; v += kNarrow) tiles(rows, a, b, factors, k, next, from + i + v * kLanes, i + v * kLanes, codes);
    }
  }

  template <class B>
  void tiles(long rows, const float* const* a, const B& b, const typename B::Factors& factors, long k, long next, long column, long at,
             typename B::Codes& codes) const {
    const long count = (rows + 3) / 4, height = (rows + count - 1) / count;  // of equal height
    for (long r = 0; r < rows; r += height) switch (std::min(height, rows - r)) {
        case 1: tile<1, kNarrow>(a, b, factors, r, k, next, column, at, codes); break;
        case 2: tile<2, kNarrow>(a, b, factors, r, k, next, column, at, codes); break;
        case 3: tile<3, kNarrow>(a, b, factors, r, k, next, column, at, codes); break;
        default: tile<4, kNarrow>(a, b, factors, r, k, next, column, at, codes); break;
      }
  }

  template <int rows, int vectors, class B>
  void tile(const float* const* a, const B& from, const typename B::Factors& scales, long r, long k, long next, long column, long at,
            typename B::Codes& seen) const {
    const B b = from;  // copies, which stores cannot have changed
    const typename B::Factors factors = scales;
    typename B::Codes codes = seen;
    Vec total[rows][vectors];
    const float* x[rows];
    DSJAX_EACH(row, rows) {
      x[row] = a[r + row];
      DSJAX_EACH(v, vectors) total[row][v] = load(sums(0, r + row) + at + v * kLanes);
    }
    for (; k < next; k += B::rows_of_a_byte)
      DSJAX_EACH(part, B::rows_of_a_byte) {
        Vec w[vectors];
        b.quick(k, part, column, factors, w, codes);
        DSJAX_EACH(v, vectors) pin(w[v]);
        DSJAX_EACH(row, rows) {
          const Vec own = broadcast(x[row][k + part]);
          DSJAX_EACH(v, vectors) total[row][v] += own * w[v];
        }
      }
    DSJAX_EACH(row, rows) DSJAX_EACH(v, vectors) store(sums(0, r + row) + at + v * kLanes, total[row][v]);
    seen = codes;
  }

  static constexpr int kNarrow = kRegisters == 32 ? kGroup : 2;  // vectors that more rows take at once

  float* sums_;
  long rows_;
};

}  // namespace dsjax
