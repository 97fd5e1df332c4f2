// Packed B: two values a byte along the depth, and a scale for each 16 or 32 of the depth, by column. FP4: e2m1 values, with e4m3 scales of
// 16 or e8m0 scales of 32. INT4: integers, whose code is 8 more, with bfloat16 scales of 32.
#pragma once

#include <algorithm>

#include "products.h"
#include "quantise.h"

namespace dsjax {

constexpr long kRoundedTogetherInFp4 = 16;  // values of a row that share a scale in NVFP4

// A matrix [depth, columns]; `pieces` of a sum over its depth are of whole bytes. Scale: the bits of a scale, two bytes in INT4.
template <class Scale>
struct Packed {
  const uint8_t* data;  // [depth / 2, columns] in rows `stride` apart
  const Scale* scale;   // [depth / block, columns] in rows `stride` apart
  long stride, block;
  static constexpr bool scaled = true;
  static constexpr bool integers = sizeof(Scale) == 2;
  static constexpr long line = 64;
  static constexpr int rows_of_a_byte = 2;

  void prefetch(long k, long column) const {
    __builtin_prefetch(data + (k >> 1) * stride + column, 0, 2);
    if ((k & (block - 1)) == 0) __builtin_prefetch(scales_at(k, column), 0, 2);
  }
  long alike(long k, long end) const { return std::min(end, (k | (block - 1)) + 1); }
  // The block is a power of two: with a division for each group, one row took a tenth longer.
  const Scale* scales_at(long k, long column) const { return scale + (k >> __builtin_ctzl(block)) * stride + column; }

  float one(long k, long column) const {
    constexpr float sizes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    const int code = data[(k >> 1) * stride + column] >> (k % 2 * 4) & 15;
    const UIntVec own = UIntVec{} + *scales_at(k, column);
    if constexpr (integers) return static_cast<float>(code - 8) * bits<Vec>(own << 16)[0];
    const float size = sizes[code & 7] * scale_in(own)[0];
    return code & 8 ? -size : size;
  }
  Vec at(long k, long column) const {
    Vec values;
    for (int lane = 0; lane < kLanes; lane++) values[lane] = one(k, column + lane);
    return values;
  }

  Vec scale_in(UIntVec byte) const {
    if (block == 32) return bits<Vec>((byte & 0xff) << 23);  // e8m0: a float32's exponent
#if defined(__F16C__) && defined(__AVX512F__)
    return Float8::convert_halves(__builtin_convertvector(bits<IntVec>(byte << 24) >> 17, Float8::Halves) & static_cast<int16_t>(0xbf80)) * 256.0f;
#endif
    return Float8::widen_number(byte);
  }

  // A product of a value and its scale has six bits, of an integer twelve, so that neither way of having it rounds.
  typedef AnyCode Codes;
#if defined(__AVX2__) && defined(__F16C__) && !defined(__AVX512F__)
  typedef uint8_t Bytes __attribute__((vector_size(4 * kLanes)));
  typedef char Chars __attribute__((vector_size(4 * kLanes)));

  // The scales of a group's columns, and the two upper bytes of each code's float32.
  struct Factors {
    Vec of[kGroup];
    Bytes high, low;
  };
  static Bytes both_lanes(const uint8_t* table) {
    Bytes found;
    std::memcpy(&found, table, 2 * kLanes), std::memcpy(reinterpret_cast<char*>(&found) + 2 * kLanes, table, 2 * kLanes);
    return found;
  }
  Factors factors(long k, long column) const {
    static constexpr uint8_t low[2][16] = {{0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0, 0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0},
                                           {0, 0xe0, 0xc0, 0xa0, 0x80, 0x40, 0, 0x80, 0, 0x80, 0, 0x40, 0x80, 0xa0, 0xc0, 0xe0}};
    static constexpr uint8_t high[2][16] = {{0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0},
                                            {0xc1, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xbf, 0, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40}};
    Factors found;
    found.low = both_lanes(low[integers]), found.high = both_lanes(high[integers]);
    if constexpr (integers) {
      for (int part = 0; part < 2; part++) {
        const Scale* own = scales_at(k, column + 8 * part);
        UIntVec pairs;
        std::memcpy(&pairs, own, 16), std::memcpy(reinterpret_cast<char*>(&pairs) + 16, own + 16, 16);
        found.of[2 * part] = bits<Vec>(pairs << 16), found.of[2 * part + 1] = bits<Vec>(pairs & 0xffff0000u);
      }
      return found;
    }
    const Chars scales = load_as<Chars>(scales_at(k, column)), none{};
    if (block == 32) {
      const UIntVec first = first_in_turn(scales, none), last = last_in_turn(scales, none);
      found.of[0] = bits<Vec>(first << 23), found.of[1] = bits<Vec>(first >> 16 << 23);
      found.of[2] = bits<Vec>(last << 23), found.of[3] = bits<Vec>(last >> 16 << 23);
    } else {
      constexpr int16_t kept = static_cast<int16_t>(0xbf80);
      typedef Float8::Shorts Shorts;
      Float8::widen_both(((Shorts)first_in_turn(none, scales) >> 1) & kept, found.of[0], found.of[1]);
      Float8::widen_both(((Shorts)last_in_turn(none, scales) >> 1) & kept, found.of[2], found.of[3]);
      for (int v = 0; v < kGroup; v++) found.of[v] *= 256.0f;
      deinterleave(found.of[0], found.of[1]), deinterleave(found.of[2], found.of[3]);
    }
    return found;
  }
  // Of the first eight columns and the third eight the even ones and the odd ones, and so of the second and the fourth eight.
  void quick(long k, int part, long column, const Factors& factors, Vec (&values)[kGroup], Codes&) const {
    UIntVec codes = load_as<UIntVec>(data + (k >> 1) * stride + column);
    if (part) codes = codes >> 4;
    const Chars own = bits<Chars>(codes & 0x0f0f0f0fu);
    const Chars high = __builtin_ia32_pshufb256((Chars)factors.high, own), low = __builtin_ia32_pshufb256((Chars)factors.low, own);
    const UIntVec first = first_in_turn(low, high), last = last_in_turn(low, high);
    values[0] = bits<Vec>(first << 16) * factors.of[0], values[1] = bits<Vec>(first & 0xffff0000u) * factors.of[1];
    values[2] = bits<Vec>(last << 16) * factors.of[2], values[3] = bits<Vec>(last & 0xffff0000u) * factors.of[3];
  }
  static void order(Vec (&values)[kGroup]) {
    interleave(values[0], values[1]);
    interleave(values[2], values[3]);
    std::swap(values[1], values[2]);
  }
#else
  struct Factors {
    Vec of[kGroup];
  };
  Factors factors(long k, long column) const {
    const Scale* own = scales_at(k, column);
    Factors found;
    if constexpr (integers) {
      Vec even = load_as<Vec>(own), odd = load_as<Vec>(own + 2 * kLanes);  // words of two scales
      deinterleave(even, odd);
      found.of[0] = bits<Vec>(bits<UIntVec>(even) << 16), found.of[1] = bits<Vec>(bits<UIntVec>(even) & 0xffff0000u);
      found.of[2] = bits<Vec>(bits<UIntVec>(odd) << 16), found.of[3] = bits<Vec>(bits<UIntVec>(odd) & 0xffff0000u);
    } else {
      const UIntVec scales = load_as<UIntVec>(own);
      for (int v = 0; v < kGroup; v++) found.of[v] = scale_in(scales >> (8 * v));
    }
    return found;
  }
  // As the columns' bytes lie in 32-bit words: vector v has columns v, v + 4, v + 8, ...
  void quick(long k, int part, long column, const Factors& factors, Vec (&values)[kGroup], Codes&) const {
    const UIntVec words = load_as<UIntVec>(data + (k >> 1) * stride + column);
    DSJAX_EACH(v, kGroup) values[v] = widen(words >> (8 * v + 4 * part)) * factors.of[v];
  }
  static void order(Vec (&values)[kGroup]) {
    interleave(values[0], values[2]);
    interleave(values[1], values[3]);
    interleave(values[0], values[1]);
    interleave(values[2], values[3]);
  }
#endif
  Factors quick_factors(long k, long column, Codes&) const { return factors(k, column); }
  void group(long k, long column, const Factors& factors, Vec (&values)[kGroup]) const {
    Codes codes;
    quick(k & ~1L, static_cast<int>(k & 1), column, factors, values, codes);
  }
  static void order_quick(Vec (&values)[kGroup]) { order(values); }

 private:
  // Of a byte in each lane, in its low eight bits: the value of its low half. Higher bits may be anything.
  static Vec widen(UIntVec code) {
#if defined(__AVX512F__)
    // A shuffle looks at four bits of an index, as many as 16 lanes need.
    static constexpr float values[2][16] = {{0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f},
                                            {-8.0f, -7.0f, -6.0f, -5.0f, -4.0f, -3.0f, -2.0f, -1.0f, 0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f}};
#if defined(__clang__)
    return (Vec)_mm512_permutexvar_ps((__m512i)code, (__m512)load(values[integers]));
#else
    return __builtin_shuffle(load(values[integers]), bits<IntVec>(code));
#endif
#else
    if constexpr (integers) return __builtin_convertvector(bits<IntVec>(code & 15), Vec) - 8.0f;
    const UIntVec magnitude = code & 7;
    const Vec normal = bits<Vec>((magnitude << 22) + (126u << 23));
    const Vec small = __builtin_convertvector(bits<IntVec>(magnitude), Vec) * 0.5f;
    const Vec value = bits<IntVec>(magnitude) < 2 ? small : normal;
    return bits<Vec>(bits<UIntVec>(value) | ((code << 28) & 0x80000000u));
#endif
  }
};

typedef Packed<uint8_t> Fp4;
typedef Packed<uint16_t> Int4;

DSJAX_PANEL_AND_STREAM_PRODUCT(extern, Fp4)
DSJAX_PANEL_AND_STREAM_PRODUCT(extern, Int4)

// The e2m1 number nearest to a value of at most 6; of two equally near the one whose fraction is even.
inline float to_e2m1(float value) {
  const float size = std::fabs(value);
  if (size < 2.0f) return std::nearbyint(value * 2.0f) * 0.5f;
  return size < 4.0f ? std::nearbyint(value) : std::nearbyint(value * 0.5f) * 2.0f;
}

// row[i] becomes `factor` times what NVFP4 keeps of it, as dsjax/fp4/rows.py has it: a scale of the whole row, largest magnitude / (6 x 448),
// and an e4m3 scale of each 16 values. `width` is whole blocks of 16. A number that is not finite leaves NaNs.
inline void round_to_nvfp4(float* row, long width, float factor) {
  float whole = largest_magnitude(row, row + width) * (1.0f / (6.0f * 448.0f));
  if (whole < std::numeric_limits<float>::min()) whole = 1.0f;  // XLA takes it for zero
  for (long first = 0; first < width; first += kRoundedTogetherInFp4) {
    const long end = first + kRoundedTogetherInFp4;
    const float scale = to_e4m3(std::clamp(largest_magnitude(row + first, row + end) * (1.0f / 6.0f) / whole, 0.001953125f, 448.0f));
    for (long i = first; i < end; i++)
      row[i] = to_e2m1(std::clamp(row[i] / (scale * whole), -6.0f, 6.0f)) * scale * whole * factor;
  }
}

}  // namespace dsjax
