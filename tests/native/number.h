// One number of any dtype, to and from float64: written from the formats' definitions, not from the kernels.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "../../csrc/fastagg.h"

namespace test {

using namespace fastagg;

constexpr int32_t floating[] = {F32, F64, BF16, F16};
constexpr int32_t integer[] = {I8, I16, I32, I64, U8};

template <class T> T copied(const void* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

inline double half_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  if (exponent == 31) magnitude = fraction ? std::nan("") : std::numeric_limits<double>::infinity();
  return bits >> 15 ? -magnitude : magnitude;
}

inline double bfloat_value(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  return copied<float>(&wide);
}

// v to a multiple of 2^least, and to `digits` significant bits: to nearest, ties to even
inline double rounded(double v, int digits, int least) {
  int exponent;
  if (v == 0 || !std::isfinite(v)) return v;
  std::frexp(v, &exponent);
  const int unit = std::max(exponent - digits, least);
  return std::ldexp(std::nearbyint(std::ldexp(v, -unit)), unit);
}

inline uint16_t half_bits(double v) {
  const uint16_t sign = std::signbit(v) ? 0x8000 : 0;
  if (std::isnan(v)) return sign | 0x7e00;
  v = std::fabs(rounded(v, 11, -24));
  if (v >= 65536) return sign | 0x7c00;
  if (v < 0x1p-14) return sign | uint16_t(std::ldexp(v, 24));
  int exponent;
  const double fraction = std::frexp(v, &exponent);  // in [1/2, 1)
  return uint16_t(sign | (exponent + 14) << 10 | (int(std::ldexp(fraction, 11)) - 1024));
}

inline uint16_t bfloat_bits(double v) {
  const float narrow = float(rounded(v, 8, -133));  // exact, or infinite
  uint32_t bits;
  std::memcpy(&bits, &narrow, sizeof bits);
  return uint16_t(bits >> 16);
}

inline double decode(int32_t dtype, const void* p) {
  switch (dtype) {
    case F32:
      return copied<float>(p);
    case F64:
      return copied<double>(p);
    case BF16:
      return bfloat_value(copied<uint16_t>(p));
    default:
      return half_value(copied<uint16_t>(p));
  }
}

// v, rounded once to the dtype
inline void encode(int32_t dtype, double v, void* p) {
  auto put = [&](auto value) { std::memcpy(p, &value, sizeof value); };
  switch (dtype) {
    case F32:
      return put(float(v));
    case F64:
      return put(v);
    case BF16:
      return put(bfloat_bits(v));
    default:
      return put(half_bits(v));
  }
}

}  // namespace test
