// Rows rounded to FP8 (e4m3) with a scale for each 128 values, and widened again: what products with quantised activations multiply.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"

namespace dsjax {

constexpr long kRoundedTogether = 128;  // values of a row that share a scale

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

// NaN where one of the values is.
inline float largest_magnitude(const float* value, const float* end) {
  float largest = 0;
  for (; value < end; value++) {
    const float size = std::fabs(*value);
    if (size > largest || size != size) largest = size;
  }
  return largest;
}

// row[i] becomes `factor` times what e4m3 keeps of it. A number that is not finite leaves a NaN.
inline void round_to_fp8(float* row, long width, bool powers, float factor) {
  for (long first = 0; first < width; first += kRoundedTogether) {
    const long end = std::min(width, first + kRoundedTogether);
    const float scale = scale_of(largest_magnitude(row + first, row + end), powers);
    for (long i = first; i < end; i++) row[i] = to_e4m3(std::clamp(row[i] / scale, -448.0f, 448.0f)) * scale * factor;
  }
}

}  // namespace dsjax
