// The λ-gates and their slopes for one float, in a form that a compiler vectorizes; and bfloat16 as its bits.

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
  // and λ's NaN is the ordinary one (function.py), so that the sum carries nothing over.
  const uint32_t bits = float_to_bits(value);
  target.bits = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// ---------------------------------------------------------------------------------------------------------
// The mathematics. A gate is a struct with
//   kScale     |λx|·kScale is its argument v, so that one product serves all elements of a λ
//   kLimit     the v from which on G no longer changes
//   kRate      λ²·∂f/∂λ = u²·g(u) is kRate times what `slopes` gives
//   tail(v)    G(−|u|)
//   parts(v, undefined)  the three numbers below, with `undefined`, 0 or NaN, added to the exponential

struct Parts {
  float tail;         // G(−|u|)
  float slope;        // |u|·g(u)
  float in_hardness;  // u²·g(u)/kRate
};

// 2^(−z), z ≥ 0, exactly 0 from `end` on: far from the subnormals that slow a CPU threefold. −z is split into an
// integer, which goes into the exponent's bits, and a rest in [−½, ½], exactly where z is a product in a fused
// multiply-add; 2^rest by a minimax polynomial with the largest relative error 8e-8.
constexpr float kShifter = 12582912.0f;  // 1.5·2²³: a sum with it has its integer in its last bits

inline float power(float shifted, float rest, float end) {
  float p = 1.32765e-3f;
  p = p * rest + 9.67555e-3f;
  p = p * rest + 5.550713e-2f;
  p = p * rest + 2.402212e-1f;
  p = p * rest + 6.9314697e-1f;
  p = p * rest + 1.0f;
  const float power = bits_to_float(float_to_bits(p) + (float_to_bits(shifted) << 23));
  return shifted < kShifter - end ? 0.0f : power;  // a NaN stays one
}

// x·Φ(λx), with v = |λx|·√(½·log₂e), so that e^(−(λx)²/2) = 2^(−v²).
struct lambda_gelu {
  static constexpr float kScale = 0.8493218003f;  // √(½·log₂e)
  static constexpr float kLimit = 9.0f;
  static constexpr double kRate = 0.39894228040143268 * 1.3862943611198906;  // 1/√(2π), and (u/v)² = 2·ln 2
  static constexpr float kUnscale = 1.1774100226f;  // |λx| = v·kUnscale
  static constexpr float kInvSqrt2Pi = 0.3989422804f;

  static inline float gaussian(float v) {
    const float shifted = kShifter - v * v;
    return power(shifted, (kShifter - shifted) - v * v, 80.0f);  // from |u| = 10.5 on it is 0
  }

  // Φ(−|u|) = e^(−u²/2)·½·erfcx(|u|/√2), the second factor as a minimax polynomial in 1/(1 + c|u|): exactly ½ at 0,
  // so near that Φ is off by 1.3e-7 at most, and the tail by 7e-5 of itself down to u = −5, 8e-4 to −8.
  static inline float lower_tail(float v, float gaussian_of_v) {
    const float t = 1.0f / (1.0f + 0.28f * kUnscale * v);
    float p = -0x1.b5b4eap-4f;
    p = p * t + 0x1.93cb7ep-2f;
    p = p * t - 0x1.f4b08ep-3f;
    p = p * t + 0x1.19bf60p-2f;
    p = p * t + 0x1.09eb4cp-4f;
    p = p * t + 0x1.deff40p-4f;
    return gaussian_of_v * (p * t);
  }

  static inline float tail(float v) { return lower_tail(v, gaussian(v)); }

  static inline Parts parts(float v, float undefined) {
    const float g = gaussian(v) + undefined;
    const float vg = v * g;
    return {lower_tail(v, g), kUnscale * kInvSqrt2Pi * vg, v * vg};
  }
};

// x·σ(λx), with v = |λx|·log₂e, so that e^(−|λx|) = 2^(−v).
struct lambda_silu {
  static constexpr float kScale = 1.4426950409f;
  static constexpr float kLimit = 130.0f;
  static constexpr double kRate = 0.48045301391820142;  // (u/v)² = (ln 2)²
  static constexpr float kUnscale = 0.6931471806f;

  static inline float exponential(float v) {
    const float shifted = kShifter - v;
    return power(shifted, (kShifter - shifted) - v, 120.0f);
  }

  static inline float tail(float v) {
    const float e = exponential(v);
    return e / (1.0f + e);
  }

  static inline Parts parts(float v, float undefined) {
    const float e = exponential(v) + undefined;
    const float t = 1.0f / (1.0f + e), tail = e * t, vg = v * (tail * t);
    return {tail, kUnscale * vg, v * vg};
  }
};

// x·½(1 + tanh(√(2/π)·(u + 0.044715·u³))) = x·σ(q) with q = 2√(2/π)·(u + 0.044715·u³), u = λx, and v = |u|.
struct lambda_gelu_tanh {
  static constexpr float kScale = 1.0f;
  static constexpr float kLimit = 11.0f;
  static constexpr double kRate = 1.0;
  static constexpr float kLinear = 1.5957691216f, kCubic = 0.0713548163f;  // of q
  static constexpr float kLog2E = 1.4426950409f;

  static inline float exponential(float v) {
    const float z = v * (kLog2E * kLinear + kLog2E * kCubic * (v * v));
    const float shifted = kShifter - z;
    return power(shifted, (kShifter - shifted) - z, 120.0f);
  }

  static inline float tail(float v) {
    const float e = exponential(v);
    return e / (1.0f + e);
  }

  static inline Parts parts(float v, float undefined) {
    const float e = exponential(v) + undefined;
    const float t = 1.0f / (1.0f + e), tail = e * t;
    const float slope = v * (tail * t * (kLinear + 3.0f * kCubic * (v * v)));
    return {tail, slope, v * slope};
  }
};

inline float magnitude(float x, float scaled_hardness) { return __builtin_fabsf(scaled_hardness * x); }

template <class Gate>
inline float value(float x, float scaled_hardness) {
  const float tail = Gate::tail(magnitude(x, scaled_hardness));
  return x * (x > 0 ? 1.0f - tail : tail);
}

struct Slopes {
  float in_x;         // ∂f/∂x = G(u) + u·g(u)
  float in_hardness;  // λ²·∂f/∂λ = u²·g(u), over kRate
};

template <class Gate>
inline Slopes slopes(float x, float scaled_hardness) {
  const float unbounded = magnitude(x, scaled_hardness);  // it may have overflowed
  const float v = Gate::kLimit < unbounded ? Gate::kLimit : unbounded;
  const Parts parts = Gate::parts(v, 0.0f * x);  // NaN where x is infinite: there no slope exists
  const float lower = parts.tail - parts.slope;  // the slope at −|u|
  return {x > 0 ? 1.0f - lower : lower, parts.in_hardness};
}

}  // namespace
