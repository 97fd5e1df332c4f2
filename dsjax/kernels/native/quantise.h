// Rows rounded to FP8 (e4m3) with a scale for each 128 values, or to NVFP4 with a scale for each 16 and one for the row, and widened again:
// what products with quantised activations multiply.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"

namespace dsjax {

constexpr long kRoundedTogether = 128;  // values of a row that share a scale in FP8
constexpr long kRoundedTogetherInFp4 = 16;

// What an expert's hidden values are rounded to before they are multiplied with its second matrix.
enum class Hidden : int64_t { float32 = 0, fp8 = 1, nvfp4 = 2 };

// The e4m3 number nearest to a value of at most 448; of two equally near the even one.
inline float to_e4m3(float value) {
  if (!(std::fabs(value) >= 0.015625f)) return std::nearbyint(value * 512.0f) * 0.001953125f;  // 2^-6; below it, multiples of 2^-9
  uint32_t all = bits<uint32_t>(value);
  all += 0x7ffffu + (all >> 20 & 1);
  return bits<float>(all & ~0xfffffu);
}

// The scale of values of which the largest magnitude is `largest`, as sharding/fp8.py has it. powers: a power of two, rounded up.
inline float scale_of(float largest, bool powers) {
  float scale = largest >= std::numeric_limits<float>::min() ? std::max(largest, 1e-10f) * (1.0f / 448.0f) : 1.0f;
  return powers ? bits<float>((bits<uint32_t>(scale) + 0x7fffffu) & ~0x7fffffu) : scale;
}

// row[i] becomes `factor` times what e4m3 keeps of it. A number that is not finite leaves a NaN.
inline void round_to_fp8(float* row, long width, bool powers, float factor) {
  for (long first = 0; first < width; first += kRoundedTogether) {
    const long end = std::min(width, first + kRoundedTogether);
    float largest = 0;
    for (long i = first; i < end; i++) {
      const float size = std::fabs(row[i]);
      if (size > largest || size != size) largest = size;
    }
    const float scale = scale_of(largest, powers);
    for (long i = first; i < end; i++) row[i] = to_e4m3(std::clamp(row[i] / scale, -448.0f, 448.0f)) * scale * factor;
  }
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
