// B in FP4: two e2m1 values a byte along the depth, and a scale for each 16 (e4m3) or 32 (e8m0) of the depth, by column.
#pragma once

#include <algorithm>

#include "product.h"
#include "quantise.h"

namespace dsjax {

constexpr long kRoundedTogetherInFp4 = 16;  // values of a row that share a scale in NVFP4

// Of a byte in each lane, in its low eight bits: the value of its low half. Higher bits may be anything.
inline Vec widen_e2m1(UIntVec code) {
#if !defined(__clang__) && (defined(__AVX512F__) || defined(__AVX2__))
  // A shuffle looks at as many bits of an index as there are lanes: four with AVX-512, three with AVX2, which leaves the sign.
  const Vec table = [] {
    Vec values{};
    const float all[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    std::memcpy(&values, all, sizeof(values));
    return values;
  }();
  Vec value = __builtin_shuffle(table, bits<IntVec>(code));
  if constexpr (kLanes == 8) value = bits<Vec>(bits<UIntVec>(value) | ((code << 28) & 0x80000000u));
  return value;
#else
  const UIntVec magnitude = code & 7;
  const Vec normal = bits<Vec>((magnitude << 22) + (126u << 23));
  const Vec small = __builtin_convertvector(bits<IntVec>(magnitude), Vec) * 0.5f;
  const Vec value = bits<IntVec>(magnitude) < 2 ? small : normal;
  return bits<Vec>(bits<UIntVec>(value) | ((code << 28) & 0x80000000u));
#endif
}

// Columns of a strip stand in four vectors as their bytes lie in 32-bit words: vector v has columns v, v + 4, v + 8, ...
// Puts them in order.
inline void order(Vec (&quad)[4]) {
  interleave(quad[0], quad[2]);
  interleave(quad[1], quad[3]);
  interleave(quad[0], quad[1]);
  interleave(quad[2], quad[3]);
}

struct Fp4 {
  static constexpr long kColumns = 4 * kLanes, kRows = 5;  // of a tile: with its scales it fills 32 registers
  const uint8_t* data;   // [depth / 2, columns] in rows `stride` apart
  const uint8_t* scale;  // [depth / block, columns] in rows `stride` apart
  long stride, block;

  Vec scale_in(UIntVec byte) const {
    if (block == 32) return bits<Vec>((byte & 0xff) << 23);  // e8m0: a float32's exponent
    const UIntVec magnitude = byte & 0x7f;
    const Vec normal = bits<Vec>((magnitude << 20) + (120u << 23));
    const Vec subnormal = __builtin_convertvector(bits<IntVec>(magnitude), Vec) * 0.001953125f;  // 2^-9
    const Vec value = bits<IntVec>(magnitude) < 8 ? subnormal : normal;
    return bits<Vec>(bits<UIntVec>(value) | ((byte & 0x80) << 24));
  }
  // Bytes of a strip of which `width` columns are there; the others count as zeros.
  template <bool whole>
  static UIntVec words(const uint8_t* from, long width) {
    if constexpr (whole) return load_as<UIntVec>(from);
    UIntVec some{};
    std::memcpy(&some, from, width);
    return some;
  }
};

// A strip of the product of a tile of rows, weights widened in registers: c[r][column + c_shift ...] of `width` columns. An element's sum
// runs over k in order, in pieces as in `tile`.
template <int rows, bool full>
__attribute__((noinline)) void strip(const float* const* a, const Fp4& b, long column, long width, long depth, float* const* c, long c_shift,
                                     long piece) {
  constexpr long ahead = 24;  // rows of bytes: each is on a page of its own, where no hardware looks ahead
  Vec total[rows][4], whole[kMostLevels][rows][4];
  for (long first = 0, number = 0; first < depth; first += piece, number++) {
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++) total[r][v] = Vec{};
    const long end = std::min(first + piece, depth);
    for (long from = first, next; from < end; from = next) {
      next = std::min((from / b.block + 1) * b.block, end);
      const UIntVec scales = Fp4::words<full>(b.scale + from / b.block * b.stride + column, width);
      Vec factor[4];
      for (int v = 0; v < 4; v++) factor[v] = b.scale_in(scales >> (8 * v));
      for (long k = from; k < next; k += 2) {
        const uint8_t* at = b.data + k / 2 * b.stride + column;
        __builtin_prefetch(at + ahead * b.stride);
        const UIntVec words = Fp4::words<full>(at, width);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
          Vec w[4];
#pragma GCC unroll 4
          for (int v = 0; v < 4; v++) w[v] = widen_e2m1(words >> (8 * v + 4 * half)) * factor[v];
#pragma GCC unroll 6
          for (int r = 0; r < rows; r++) {
            const Vec x = broadcast(a[r][k + half]);
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) total[r][v] += x * w[v];
          }
        }
      }
    }
    // Sums of 1, 2, 4 pieces wait in `whole` for as many pieces more.
    int level = 0;
    for (; number >> level & 1; level++)
#pragma GCC unroll 6
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) total[r][v] = whole[level][r][v] + total[r][v];
    if (end < depth)
#pragma GCC unroll 6
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) whole[level][r][v] = total[r][v];
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++) {
    order(total[r]);
    float* to = c[r] + column + c_shift;
    if constexpr (full) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++) store(to + v * kLanes, total[r][v]);
    } else {
      float sums[Fp4::kColumns];
      for (int v = 0; v < 4; v++) store(sums + v * kLanes, total[r][v]);
      std::copy(sums, sums + width, to);
    }
  }
}

template <bool full>
inline void strips(long count, const float* const* a, const Fp4& b, long column, long width, long depth, float* const* c, long c_shift,
                   long piece) {
  const long tiles = (count + Fp4::kRows - 1) / Fp4::kRows, height = (count + tiles - 1) / tiles;
  for (long r = 0; r < count; r += height) switch (std::min(height, count - r)) {
      case 1: strip<1, full>(a + r, b, column, width, depth, c + r, c_shift, piece); break;
      case 2: strip<2, full>(a + r, b, column, width, depth, c + r, c_shift, piece); break;
      case 3: strip<3, full>(a + r, b, column, width, depth, c + r, c_shift, piece); break;
      case 4: strip<4, full>(a + r, b, column, width, depth, c + r, c_shift, piece); break;
      default: strip<5, full>(a + r, b, column, width, depth, c + r, c_shift, piece); break;
    }
}

// c[r][j + c_shift] = sum over k < depth of a[r][k] * b(k, j), for from <= j < to; `piece`, which is even, as of `product`. A strip is
// widened again for each tile of rows: at 48 rows that still takes no longer than widening it once into memory.
inline void fp4_product(long count, const float* const* a, const Fp4& b, long from, long to, long depth, float* const* c, long c_shift,
                        long piece) {
  long column = from;
  for (; column + Fp4::kColumns <= to; column += Fp4::kColumns) strips<true>(count, a, b, column, Fp4::kColumns, depth, c, c_shift, piece);
  if (column < to) strips<false>(count, a, b, column, to - column, depth, c, c_shift, piece);
}

// The e2m1 number nearest to a value of at most 6; of two equally near the one whose fraction is even.
inline float to_e2m1(float value) {
  const float size = std::fabs(value);
  if (size < 2.0f) return std::nearbyint(value * 2.0f) * 0.5f;
  return size < 4.0f ? std::nearbyint(value) : std::nearbyint(value * 0.5f) * 2.0f;
}

// row[i] becomes `factor` times what NVFP4 keeps of it, as dsjax/fp4/rows.py has it: a scale of the whole row, largest magnitude / (6 x 448),
// and an e4m3 scale of each 16 values. `width` is whole blocks of 16. A number that is not finite leaves NaNs.
inline void round_to_nvfp4(float* row, long width, float factor) {
  auto most_of = [&](long first, long end) {
    float most = 0;
    for (long i = first; i < end; i++) {
      const float size = std::fabs(row[i]);
      if (size > most || size != size) most = size;
    }
    return most;
  };
  float whole = most_of(0, width) * (1.0f / (6.0f * 448.0f));
  if (whole < std::numeric_limits<float>::min()) whole = 1.0f;  // XLA takes it for zero
  for (long first = 0; first < width; first += kRoundedTogetherInFp4) {
    const long end = first + kRoundedTogetherInFp4;
    const float scale = to_e4m3(std::clamp(most_of(first, end) * (1.0f / 6.0f) / whole, 0.001953125f, 448.0f));
    for (long i = first; i < end; i++)
      row[i] = to_e2m1(std::clamp(row[i] / (scale * whole), -6.0f, 6.0f)) * scale * whole * factor;
  }
}

}  // namespace dsjax
