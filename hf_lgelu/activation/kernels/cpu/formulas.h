// λ-GELU and its slopes for one float, in a form that a compiler vectorizes; and bfloat16 as its bits.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

// ---------------------------------------------------------------------------------------------------------
// bfloat16 as its bits

struct bfloat16 {
  uint16_t bits;
};

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float load(float value) { return value; }
inline float load(bfloat16 value) { return bits_to_float(static_cast<uint32_t>(value.bits) << 16); }

inline void store(float& target, float value) { target = value; }
inline void store(bfloat16& target, float value) {
  // To nearest, ties to even. A NaN stays one: the last 16 bits of any NaN here are 0, since x and δ have none
  // and λ's NaN is the ordinary one (passes.py), so that the sum carries nothing over.
  const uint32_t bits = float_to_bits(value);
  target.bits = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// ---------------------------------------------------------------------------------------------------------
// The mathematics, on v = |λx|·√(½·log₂e), so that e^(−(λx)²/2) = 2^(−v²)

constexpr float kScale = 0.8493218003f;    // √(½·log₂e)
constexpr float kUnscale = 1.1774100226f;  // |λx| = v / kScale
constexpr float kInvSqrt2Pi = 0.3989422804f;

inline float magnitude(float x, float scaled_hardness) { return __builtin_fabsf(scaled_hardness * x); }

// 2^(−v²): −v² is split into an integer, which goes into the exponent's bits, and a rest in [−½, ½], exactly by
// fused multiply-adds; 2^rest by a minimax polynomial with the largest relative error 8e-8. Below 2^−80 (from
// |u| = 10.5 on) it counts as 0, far from the subnormals that slow a CPU threefold.
inline float gaussian(float v) {
  constexpr float shifter = 12582912.0f;  // 1.5·2²³: a sum with it has its integer in its last bits
  const float shifted = shifter - v * v;
  const float rest = (shifter - shifted) - v * v;
  float p = 1.32765e-3f;
  p = p * rest + 9.67555e-3f;
  p = p * rest + 5.550713e-2f;
  p = p * rest + 2.402212e-1f;
  p = p * rest + 6.9314697e-1f;
  p = p * rest + 1.0f;
  const float power = bits_to_float(float_to_bits(p) + (float_to_bits(shifted) << 23));
  return shifted < shifter - 80.0f ? 0.0f : power;  // a NaN stays one
}

// Φ(−|u|) = e^(−u²/2)·½·erfcx(|u|/√2), the second factor as a minimax polynomial in 1/(1 + c|u|): exactly ½ at 0,
// so near that Φ is off by 1.3e-7 at most, and the tail by 7e-5 of itself down to u = −5, 8e-4 to −8.
inline float lower_tail(float v, float gaussian_of_v) {
  const float t = 1.0f / (1.0f + 0.28f * kUnscale * v);
  float p = -0x1.b5b4eap-4f;
  p = p * t + 0x1.93cb7ep-2f;
  p = p * t - 0x1.f4b08ep-3f;
  p = p * t + 0x1.19bf60p-2f;
  p = p * t + 0x1.09eb4cp-4f;
  p = p * t + 0x1.deff40p-4f;
  return gaussian_of_v * (p * t);
}

inline float value(float x, float scaled_hardness) {
  const float v = magnitude(x, scaled_hardness);
  const float tail = lower_tail(v, gaussian(v));
  return x * (x > 0 ? 1.0f - tail : tail);
}

struct Slopes {
  float in_x;         // ∂f/∂x = Φ(u) + u·φ(u)
  float in_hardness;  // λ²·∂f/∂λ = u²·φ(u), over kRate
};

constexpr double kRate = 0.39894228040143268 * 1.3862943611198906;  // 1/√(2π), and (u/v)² = 2·ln 2

inline Slopes slopes(float x, float scaled_hardness) {
  const float unbounded = magnitude(x, scaled_hardness);  // it may have overflowed
  const float v = 9.0f < unbounded ? 9.0f : unbounded;
  const float g = gaussian(v) + 0.0f * x;  // NaN where x is infinite: there no slope exists
  const float vg = v * g;
  const float lower = lower_tail(v, g) - kUnscale * kInvSqrt2Pi * vg;  // the slope at −|u|
  return {x > 0 ? 1.0f - lower : lower, v * vg};
}

}  // namespace
