// B in FP4: two e2m1 values a byte along the depth, and a scale for each 16 (e4m3) or 32 (e8m0) of the depth, by column.
#pragma once

#include <algorithm>

#include "product.h"
#include "quantise.h"

namespace dsjax {

constexpr long kRoundedTogetherInFp4 = 16;  // values of a row that share a scale in NVFP4

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

// c[r][j + c_shift] = sum over k < depth of a[r][k] * b(k, j), for from <= j < to; `piece`, which is even, as of `product`. A strip is
// widened again for each tile of rows: at 48 rows that still takes no longer than widening it once into memory.
void fp4_product(long count, const float* const* a, const Fp4& b, long from, long to, long depth, float* const* c, long c_shift, long piece);

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
