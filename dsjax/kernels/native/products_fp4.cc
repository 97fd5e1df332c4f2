// Products with matrices in FP4.
#include "fp4.h"

namespace dsjax {

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

inline void strips(long count, const float* const* a, const Fp4& b, long column, long depth, float* const* c, long c_shift, long piece) {
  constexpr long width = Fp4::kColumns;
  const long tiles = (count + Fp4::kRows - 1) / Fp4::kRows, height = (count + tiles - 1) / tiles;
  for (long r = 0; r < count; r += height) switch (std::min(height, count - r)) {
      case 1: strip<1, true>(a + r, b, column, width, depth, c + r, c_shift, piece); break;
      case 2: strip<2, true>(a + r, b, column, width, depth, c + r, c_shift, piece); break;
      case 3: strip<3, true>(a + r, b, column, width, depth, c + r, c_shift, piece); break;
      case 4: strip<4, true>(a + r, b, column, width, depth, c + r, c_shift, piece); break;
      default: strip<5, true>(a + r, b, column, width, depth, c + r, c_shift, piece); break;
    }
}

void fp4_product(long count, const float* const* a, const Fp4& b, long from, long to, long depth, float* const* c, long c_shift, long piece) {
  long column = from;
  for (; column + Fp4::kColumns <= to; column += Fp4::kColumns) strips(count, a, b, column, depth, c, c_shift, piece);
  for (long r = 0; column < to && r < count; r++) strip<1, false>(a + r, b, column, to - column, depth, c + r, c_shift, piece);
}

}  // namespace dsjax
