// One matrix product, C (+)= A B, from which all kernels are made: small tiles of C in registers, rows of A and C given by
// pointers (so that gathered tokens and pages are read and written in place), B read through a small reader.
//
// An element's sum has one order, whatever tile it falls into (docs/exactness.md): fused multiply-adds over k in turn, from 0. Where the
// depth is cut into pieces, which devices may share, each piece is such a sum, and the pieces are added as a binary tree.
#pragma once

#include "simd.h"

namespace dsjax {

constexpr int kTileRows = 6;
constexpr int kMostLevels = 3;  // of the tree over a sum's pieces: at most 8 of them
constexpr bool kPairs = kLanes == 16;  // whether short pieces are summed two by two; with AVX2 that took up to a fifth longer
constexpr int kPairRows = 3;           // rows of a tile that sums so
constexpr long kShortPiece = 32;       // terms of the longest piece that is summed so
constexpr long kScaleBlock = 128;  // side of the blocks that share a scale, with FP8 weights

// B as a matrix [depth, columns] in rows `stride` apart. In FP8 (e4m3) each block of 128 x 128 has a scale, in rows `scale_stride` apart:
// columns are then visited from a multiple of 128 on, in multiples of a vector or a group.
template <class Format>
struct Matrix {
  const typename Format::Stored* data;
  long stride;
  const float* scale = nullptr;
  long scale_stride = 0;
  static constexpr bool scaled = sizeof(typename Format::Stored) == 1;
  // Whether `pair` gives the even columns first and then the odd ones; the tile puts its results in order once, at its end.
  static constexpr bool mixes_pairs = sizeof(typename Format::Stored) == 2;
  void pair(long k, long column, Vec& first, Vec& second) const {
    if constexpr (scaled) {
      first = at(k, column), second = at(k, column + kLanes);
    } else {
      Vec both[2];
      Format::widen_group(data + k * stride + column, both, {});
      first = both[0], second = both[1];
    }
  }
  float scale_at(long k, long column) const { return scale[k / kScaleBlock * scale_stride + column / kScaleBlock]; }
  Vec at(long k, long column) const {
    Vec value = Format::widen(data + k * stride + column);
    if constexpr (scaled) value = value * scale_at(k, column);
    return value;
  }
  float one(long k, long column) const {
    float value = Format::widen_one(data[k * stride + column]);
    if constexpr (scaled) value = value * scale_at(k, column);
    return value;
  }
  // Rows from k on, up to `end`, of which the values of one column have one scale.
  long alike(long k, long end) const { return scaled && end > (k / kScaleBlock + 1) * kScaleBlock ? (k / kScaleBlock + 1) * kScaleBlock : end; }
  // kGroup vectors, in an order that `order` undoes. They share a scale.
  struct Factors : Format::Held {
    Vec scale;
    explicit Factors(float all) : scale(broadcast(all)) {}
  };
  Factors factors(long k, long column) const { return Factors(scaled ? scale_at(k, column) : 0.0f); }
  void group(long k, long column, const Factors& factors, Vec (&values)[kGroup]) const {
    Format::widen_group(data + k * stride + column, values, factors);
    if constexpr (scaled)
      DSJAX_EACH(v, kGroup) values[v] = values[v] * factors.scale;
  }
  static void order(Vec (&values)[kGroup]) { Format::order(values); }
  // The same sooner, and of half a group where no scale is asked for: right unless `codes` has found something.
  typedef typename Format::Codes Codes;
  Factors quick_factors(long k, long column, Codes& codes) const {
    if constexpr (!scaled) return Factors(0.0f);
    const float scale = scale_at(k, column) * Format::kQuickUnit;
    codes.note(scale);
    return Factors(scale);
  }
  template <int vectors>
  void quick(long k, int, long column, const Factors& factors, Vec (&values)[vectors], Codes& codes) const {
    if constexpr (Format::quick) Format::widen_quickly(data + k * stride + column, values, factors, codes);
    else Format::widen_group(data + k * stride + column, values, factors);
    if constexpr (scaled)
      DSJAX_EACH(v, vectors) values[v] = values[v] * factors.scale;
  }
  static void order_quick(Vec (&values)[kGroup]) {
    if constexpr (Format::quick) Format::order_quick(values);
    else Format::order(values);
  }
  // Asks for the line of memory that an element is in, into the second cache: the first has far fewer requests to memory under way at once.
  void prefetch(long k, long column) const { __builtin_prefetch(data + k * stride + column, 0, 2); }
  static constexpr long line = 64 / sizeof(typename Format::Stored);  // elements of it
  static constexpr int rows_of_a_byte = 1;
};

// Part `part` of matrix `number` of a stack [stack, depth, parts, width], with the scales of its blocks if it is FP8.
template <class Format>
Matrix<Format> part_of(const void* data, const void* scales, long number, long depth, long parts, long part, long width) {
  const long stride = parts * width, across = (width + kScaleBlock - 1) / kScaleBlock, down = (depth + kScaleBlock - 1) / kScaleBlock;
  const float* scale = Matrix<Format>::scaled ? static_cast<const float*>(scales) + (number * down * parts + part) * across : nullptr;
  return {static_cast<const typename Format::Stored*>(data) + number * depth * stride + part * width, stride, scale, parts * across};
}

// B as rows anywhere in memory.
struct Scattered {
  const float* const* rows;
  static constexpr bool mixes_pairs = false;
  void pair(long k, long column, Vec& first, Vec& second) const { first = at(k, column), second = at(k, column + kLanes); }
  Vec at(long k, long column) const { return load(rows[k] + column); }
  float one(long k, long column) const { return rows[k][column]; }
};

// What a product begins with, or does with its sums: they replace C; they are added to C once they are whole; each goes on from C, as
// if the depth before had belonged to this product.
enum class Sums { replace, add, go_on };

// together: 2 sums pieces in pairs, if they are short and their number is even. Then fewer sums wait in memory, where storing a vector of
// 64 bytes takes as long as two multiply-adds.
// A function of its own: inlined, its sums would share the registers with what is around it (attention of a decode took a fifth longer).
template <int rows, int vectors, int together, class B>
__attribute__((noinline)) void tile(const float* const* a, long a_step, const B& b, long column, long depth, float* const* c, long c_column,
                                    Sums sums, long piece) {
  Vec total[together][rows][vectors] = {}, whole[kMostLevels][rows][vectors];
  for (long first = 0, number = 0; first < depth; first += together * piece, number++) {
    DSJAX_EACH(p, together) DSJAX_EACH(r, rows) DSJAX_EACH(v, vectors)
      total[p][r][v] = together == 1 && sums == Sums::go_on && number == 0 ? load(c[r] + c_column + v * kLanes) : Vec{};
    const long end = first + together * piece < depth ? first + together * piece : depth;
    for (long k = first; k < end - (together - 1) * piece; k++)
      DSJAX_EACH(p, together) {
        const long own = k + p * piece;
        Vec w[vectors];
        if constexpr (vectors == 1) w[0] = b.at(own, column);
        DSJAX_EACH_PAIR(v, vectors) b.pair(own, column + v * kLanes, w[v], w[v + 1]);
        DSJAX_EACH(v, vectors) pin(w[v]);
        DSJAX_EACH(r, rows) {
          const Vec x = broadcast(a[r][own * a_step]);
          DSJAX_EACH(v, vectors) total[p][r][v] += x * w[v];
          if constexpr (rows * vectors == 1) pin(total[p][0][0]);
        }
      }
    if constexpr (together == 2) DSJAX_EACH(r, rows) DSJAX_EACH(v, vectors) total[0][r][v] = total[0][r][v] + total[1][r][v];
    // Sums of 1, 2, 4, … turns wait in `whole` until the next as many turns are summed, too.
    int level = 0;
    for (; number >> level & 1; level++)
      DSJAX_EACH(r, rows) DSJAX_EACH(v, vectors) total[0][r][v] = whole[level][r][v] + total[0][r][v];
    if (end < depth) DSJAX_EACH(r, rows) DSJAX_EACH(v, vectors) whole[level][r][v] = total[0][r][v];
  }
  DSJAX_EACH(r, rows) {
    if constexpr (B::mixes_pairs) DSJAX_EACH_PAIR(v, vectors) interleave(total[0][r][v], total[0][r][v + 1]);
    DSJAX_EACH(v, vectors) {
      float* to = c[r] + c_column + v * kLanes;
      store(to, sums == Sums::add ? load(to) + total[0][r][v] : total[0][r][v]);
    }
  }
}

// The columns that do not fill a vector, one by one.
template <class B>
void tail(long rows, const float* const* a, long a_step, const B& b, long column, long columns, long depth, float* const* c,
          long c_column, Sums sums, long piece) {
  for (; column < columns; column++, c_column++)
    for (long r = 0; r < rows; r++) {
      float total = 0.0f, whole[kMostLevels] = {};
      for (long first = 0, number = 0; first < depth; first += piece, number++) {
        total = sums == Sums::go_on && number == 0 ? c[r][c_column] : 0.0f;
        const long end = first + piece < depth ? first + piece : depth;
        for (long k = first; k < end; k++) total = __builtin_fmaf(a[r][k * a_step], b.one(k, column), total);
        int level = 0;
        for (; number >> level & 1; level++) total = whole[level] + total;
        if (end < depth) whole[level] = total;
      }
      c[r][c_column] = sums == Sums::add ? c[r][c_column] + total : total;
    }
}

// Whether a product sums two pieces side by side. The number of pieces is a power of two.
inline bool in_pairs(long depth, long piece) { return kPairs && piece < depth && piece <= kShortPiece; }

template <int rows, class B>
void row_tile(const float* const* a, long a_step, const B& b, long first, long columns, long depth, float* const* c, Sums sums,
              long c_shift, long piece) {
  constexpr int wide = kRegisters == 32 || rows <= 3 ? 4 : 2;
  long column = first;
  if constexpr (kPairs && rows <= kPairRows)
    if (in_pairs(depth, piece))
      for (; column + wide * kLanes <= columns; column += wide * kLanes)
        tile<rows, wide, 2>(a, a_step, b, column, depth, c, column + c_shift, sums, piece);
  for (; column + wide * kLanes <= columns; column += wide * kLanes)
    tile<rows, wide, 1>(a, a_step, b, column, depth, c, column + c_shift, sums, piece);
  if constexpr (wide == 4)  // six sums at once, of six rows and one vector, would not keep the units busy
    for (; column + 2 * kLanes <= columns; column += 2 * kLanes)
      tile<rows, 2, 1>(a, a_step, b, column, depth, c, column + c_shift, sums, piece);
  for (; column + kLanes <= columns; column += kLanes) tile<rows, 1, 1>(a, a_step, b, column, depth, c, column + c_shift, sums, piece);
  tail(rows, a, a_step, b, column, columns, depth, c, column + c_shift, sums, piece);
}

// c[r][j + c_shift] (+)= sum over k < depth of a[r][k * a_step] * b(k, j), for first <= j < columns.
// `piece`: how many of k are one piece of the sum; 0: all. There are 2^kMostLevels pieces at most, and as many as a power of two.
// `go_on` is for products of one piece with a B that does not mix pairs.
template <class B>
void product(long rows, const float* const* a, long a_step, const B& b, long first, long columns, long depth, float* const* c,
             Sums sums, long c_shift = 0, long piece = 0) {
  if (rows == 0) return;
  if (piece == 0) piece = depth;
  // Tiles of equal height; and columns in strips, so that the rows of all tiles find a strip of B in the first cache.
  const long most = in_pairs(depth, piece) ? kPairRows : kTileRows;
  const long tiles = (rows + most - 1) / most, height = (rows + tiles - 1) / tiles;
  const long strip = tiles == 1 ? columns - first : 4 * kLanes;
  for (long from = first; from < columns; from += strip) {
    const long to = from + strip < columns ? from + strip : columns;
    for (long r = 0; r < rows; r += height) {
      const long count = rows - r < height ? rows - r : height;
      switch (count) {
        case 1: row_tile<1>(a + r, a_step, b, from, to, depth, c + r, sums, c_shift, piece); break;
        case 2: row_tile<2>(a + r, a_step, b, from, to, depth, c + r, sums, c_shift, piece); break;
        case 3: row_tile<3>(a + r, a_step, b, from, to, depth, c + r, sums, c_shift, piece); break;
        case 4: row_tile<4>(a + r, a_step, b, from, to, depth, c + r, sums, c_shift, piece); break;
        case 5: row_tile<5>(a + r, a_step, b, from, to, depth, c + r, sums, c_shift, piece); break;
        default: row_tile<6>(a + r, a_step, b, from, to, depth, c + r, sums, c_shift, piece); break;
      }
    }
  }
}

}  // namespace dsjax
