// One matrix product, C (+)= A B, from which all kernels are made: small tiles of C in registers, rows of A and C given by
// pointers (so that gathered tokens and pages are read and written in place), B read through a small reader.
#pragma once

#include "simd.h"

namespace dsjax {

constexpr int kTileRows = 6;
constexpr long kScaleBlock = 128;  // side of the blocks that share a scale, with FP8 weights

// B as a matrix [depth, columns] in rows `stride` apart.
template <class Format>
struct Matrix {
  const typename Format::Stored* data;
  long stride;
  // Whether `pair` gives the even columns first and then the odd ones. Of bfloat16 that takes a shift and a mask, where
  // widening in order takes five instructions a vector; the tile puts its results in order once, at its end.
  static constexpr bool mixes_pairs = sizeof(typename Format::Stored) == 2;
  void pair(long k, long column, Vec& first, Vec& second) const {
    if constexpr (mixes_pairs) {
      const UIntVec both = load_as<UIntVec>(data + k * stride + column);
      first = bits<Vec>(both << 16), second = bits<Vec>(both & 0xffff0000u);
    } else {
      first = at(k, column), second = at(k, column + kLanes);
    }
  }
  Vec at(long k, long column) const { return Format::widen(data + k * stride + column); }
  float one(long k, long column) const { return Format::widen_one(data[k * stride + column]); }
};

// B as rows anywhere in memory.
struct Scattered {
  const float* const* rows;
  static constexpr bool mixes_pairs = false;
  void pair(long k, long column, Vec& first, Vec& second) const { first = at(k, column), second = at(k, column + kLanes); }
  Vec at(long k, long column) const { return load(rows[k] + column); }
  float one(long k, long column) const { return rows[k][column]; }
};

// B in FP8 with a scale for each block of 128 x 128. `parts` is 2 where a row is a gate and an up half of `width` each,
// with blocks of their own. A vector never crosses a block as long as columns are visited in multiples of kLanes
// within a part, which `Experts` sees to.
struct Scaled {
  const uint8_t* data;
  long stride;
  const float* scale;
  long parts, width, blocks;
  static constexpr bool mixes_pairs = false;
  void pair(long k, long column, Vec& first, Vec& second) const { first = at(k, column), second = at(k, column + kLanes); }
  float scale_at(long k, long column) const {
    long part = column >= width && parts == 2;
    return scale[((k / kScaleBlock) * parts + part) * blocks + (column - part * width) / kScaleBlock];
  }
  Vec at(long k, long column) const { return Float8::widen(data + k * stride + column) * scale_at(k, column); }
  float one(long k, long column) const { return Float8::widen_one(data[k * stride + column]) * scale_at(k, column); }
};

template <int rows, int vectors, class B>
inline void tile(const float* const* a, long a_step, const B& b, long column, long depth, float* const* c, long c_column, bool add) {
  Vec total[rows][vectors];
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) total[r][v] = Vec{};
  for (long k = 0; k < depth; k++) {
    Vec w[vectors];
    if constexpr (vectors == 1) w[0] = b.at(k, column);
#pragma GCC unroll 2
    for (int v = 0; v + 1 < vectors; v += 2) b.pair(k, column + v * kLanes, w[v], w[v + 1]);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      Vec x = broadcast(a[r][k * a_step]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) total[r][v] += x * w[v];
      if constexpr (rows * vectors == 1) pin(total[0][0]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++) {
    if constexpr (B::mixes_pairs)
#pragma GCC unroll 2
      for (int v = 0; v + 1 < vectors; v += 2) interleave(total[r][v], total[r][v + 1]);
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
      float* to = c[r] + c_column + v * kLanes;
      store(to, add ? load(to) + total[r][v] : total[r][v]);
    }
  }
}

// The columns that do not fill a vector, one by one.
template <class B>
void tail(long rows, const float* const* a, long a_step, const B& b, long column, long columns, long depth, float* const* c,
          long c_column, bool add) {
  for (; column < columns; column++, c_column++)
    for (long r = 0; r < rows; r++) {
      float total = 0.0f;
      for (long k = 0; k < depth; k++) total = __builtin_fmaf(a[r][k * a_step], b.one(k, column), total);
      c[r][c_column] = add ? c[r][c_column] + total : total;
    }
}

template <int rows, class B>
void row_tile(const float* const* a, long a_step, const B& b, long first, long columns, long depth, float* const* c, bool add,
              long c_shift) {
  constexpr int wide = kRegisters == 32 || rows <= 3 ? 4 : 2;
  long column = first;
  for (; column + wide * kLanes <= columns; column += wide * kLanes)
    tile<rows, wide>(a, a_step, b, column, depth, c, column + c_shift, add);
  if constexpr (wide == 4)
    for (; column + 2 * kLanes <= columns; column += 2 * kLanes)
      tile<rows, 2>(a, a_step, b, column, depth, c, column + c_shift, add);
  for (; column + kLanes <= columns; column += kLanes) tile<rows, 1>(a, a_step, b, column, depth, c, column + c_shift, add);
  tail(rows, a, a_step, b, column, columns, depth, c, column + c_shift, add);
}

// c[r][j + c_shift] (+)= sum over k < depth of a[r][k * a_step] * b(k, j), for first <= j < columns.
// Every element's sum runs over k in order, whatever the other rows and columns are: a result depends on its own row only.
template <class B>
void product(long rows, const float* const* a, long a_step, const B& b, long first, long columns, long depth, float* const* c,
             bool add, long c_shift = 0) {
  if (rows == 0) return;
  // Tiles of equal height; and columns in strips, so that the rows of all tiles find a strip of B in the first cache.
  const long tiles = (rows + kTileRows - 1) / kTileRows, height = (rows + tiles - 1) / tiles;
  const long strip = tiles == 1 ? columns - first : 4 * kLanes;
  for (long from = first; from < columns; from += strip) {
    const long to = from + strip < columns ? from + strip : columns;
    for (long r = 0; r < rows; r += height) {
      const long count = rows - r < height ? rows - r : height;
      switch (count) {
        case 1: row_tile<1>(a + r, a_step, b, from, to, depth, c + r, add, c_shift); break;
        case 2: row_tile<2>(a + r, a_step, b, from, to, depth, c + r, add, c_shift); break;
        case 3: row_tile<3>(a + r, a_step, b, from, to, depth, c + r, add, c_shift); break;
        case 4: row_tile<4>(a + r, a_step, b, from, to, depth, c + r, add, c_shift); break;
        case 5: row_tile<5>(a + r, a_step, b, from, to, depth, c + r, add, c_shift); break;
        default: row_tile<6>(a + r, a_step, b, from, to, depth, c + r, add, c_shift); break;
      }
    }
  }
}

}  // namespace dsjax
