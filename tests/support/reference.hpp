// The oracle: forward and backward of one MoE layer with LoRA in float64, one route at a time, plain loops
// straight from the formulas. Shares no code with the library: own bf16 rounding, own types, and the textbook
// order of the backward (grad_w = <grad_y, d>, where the operator uses <grad_h', h>), so that an algebraic slip
// shows.
//
// Every named intermediate passes through a hook. `Exact` returns it unchanged; tests use other hooks to learn
// how much rounding at those places moves a result (compare.hpp), or whether a case is exact in bf16
// (integers.hpp).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace reference {

using Vector = std::vector<double>;

// Round to nearest even on 8 bits of significand. (Subnormals keep 8 bits too: no test gets near them.)
inline double round_to_bf16(double value) {
  if (value == 0 || !std::isfinite(value)) return value;
  int exponent = 0;
  const double fraction = std::frexp(value, &exponent);  // in [0.5, 1)
  return std::ldexp(std::nearbyint(std::ldexp(fraction, 8)), exponent - 8);
}

// One projection's LoRA: rank 0 means none.
struct Adapter {
  int rank = 0;
  double scaling = 1;
  Vector a;  // [E, rank, in]
  Vector b;  // [E, out, rank]
};

struct Glu {
  enum Form { kSilu, kClamped, kGelu, kGeluTanh };  // kClamped: gpt-oss's
  Form form = kSilu;
  double limit = 7.0;  // of kClamped, as alpha
  double alpha = 1.702;
};

struct Layer {
  int experts = 0, hidden = 0, intermediate = 0;
  Vector gate, up;  // [E, I, H]
  Vector down;      // [E, H, I]
  Adapter lora_gate, lora_up, lora_down;
  bool shared_a = false;  // gate and up have one A: its gradient is the sum, under kGateA
  Glu glu;
  Vector gate_bias, up_bias;  // [E, I]; empty: none
  Vector down_bias;           // [E, H]
  bool trains_base = false;   // gradients of gate, up and down are wanted
};

struct Batch {
  int tokens = 0, top_k = 0;
  Vector x;                       // [T, H]
  std::vector<std::int64_t> ids;  // [T, k]
  Vector weights;                 // [T, k]
  Vector grad_y;                  // [T, H]
};

enum Tensor : std::size_t {
  kY,
  kGradX,
  kGradW,
  kGateA,
  kGateB,
  kUpA,
  kUpB,
  kDownA,
  kDownB,
  kGateBias,
  kUpBias,
  kDownBias,
  kGateWeight,
  kUpWeight,
  kDownWeight,
  kTensors
};
inline constexpr std::array<const char*, kTensors> kTensorNames = {
    "y",      "grad_x",    "grad_w",  "gate_a",    "gate_b",      "up_a",      "up_b",       "down_a",
    "down_b", "gate_bias", "up_bias", "down_bias", "gate_weight", "up_weight", "down_weight"};
using Results = std::array<Vector, kTensors>;

// Where a hook is called: on an input, on an intermediate (kRow: those rows that are only summed into tokens, d
// and the rows of grad_x), on a result.
enum class Site { kX, kGradY, kFactor, kInterior, kRow, kY, kGradX, kGradW, kGradFactor };

struct Exact {
  double operator()(Site, double value) const { return value; }
};

template <class Hook>
void apply(Hook& hook, Site site, Vector& values) {
  for (double& value : values) value = hook(site, value);
}

// sum over j of a[j] b[j]; in four parts, since a lone sum waits for itself: most of the tests' time was here.
inline double dot(const double* a, const double* b, int n) {
  double sum[4] = {};
  int j = 0;
  for (; j + 4 <= n; j += 4) {
    for (int part = 0; part < 4; ++part) sum[part] += a[j + part] * b[j + part];
  }
  for (; j < n; ++j) sum[0] += a[j] * b[j];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// out[i] = sum over j of m[i, j] v[j]
inline Vector times(const double* m, int rows, int cols, const Vector& v) {
  Vector out(static_cast<std::size_t>(rows), 0.0);
  for (int i = 0; i < rows; ++i) out[i] = dot(m + static_cast<std::size_t>(i) * cols, v.data(), cols);
  return out;
}

// out[j] = sum over i of v[i] m[i, j]
inline Vector transposed_times(const double* m, int rows, int cols, const Vector& v) {
  Vector out(static_cast<std::size_t>(cols), 0.0);
  for (int i = 0; i < rows; ++i) {
    const double factor = v[i];
    for (int j = 0; j < cols; ++j) out[j] += factor * m[static_cast<std::size_t>(i) * cols + j];
  }
  return out;
}

inline void add_scaled(Vector& to, double factor, const Vector& from) {
  for (std::size_t i = 0; i < to.size(); ++i) to[i] += factor * from[i];
}

// m[i, j] += factor left[i] right[j]
inline void add_outer(double* m, double factor, const Vector& left, const Vector& right) {
  for (std::size_t i = 0; i < left.size(); ++i) {
    const double of_row = factor * left[i];
    for (std::size_t j = 0; j < right.size(); ++j) m[i * right.size() + j] += of_row * right[j];
  }
}

inline double sigmoid(double z) {
  return 1.0 / (1.0 + std::exp(-z));
}

// gelu(g) and its slope.
struct Gelu {
  double value, slope;
};
inline Gelu gelu_of(const Glu& glu, double g) {
  const double pi = std::acos(-1.0);
  if (glu.form == Glu::kGelu) {
    const double cdf = std::erfc(-g / std::sqrt(2.0)) / 2;  // 1 + erf is exactly 0 from -8.3 down, this is not
    return {g * cdf, cdf + g * std::exp(-g * g / 2) / std::sqrt(2 * pi)};
  }
  const double root = std::sqrt(2 / pi);
  const double half =
      sigmoid(2 * root * (g + 0.044715 * g * g * g));  // (1 + tanh) / 2, which loses its tail too
  return {g * half, half + g * 2 * half * (1 - half) * root * (1 + 3 * 0.044715 * g * g)};
}

inline bool is_gelu(const Glu& glu) {
  return glu.form == Glu::kGelu || glu.form == Glu::kGeluTanh;
}

inline double glu_forward(const Glu& glu, double g, double u) {
  if (is_gelu(glu)) return gelu_of(glu, g).value * u;
  if (glu.form == Glu::kSilu) return g * sigmoid(g) * u;
  const double cut_g = g < glu.limit ? g : glu.limit;
  const double cut_u = u < -glu.limit ? -glu.limit : (u > glu.limit ? glu.limit : u);
  return (cut_u + 1) * cut_g * sigmoid(glu.alpha * cut_g);
}

struct GluGradient {
  double g, u;
};

// d act / d g and d act / d u; the clamps pass the gradient at their bounds.
inline GluGradient glu_backward(const Glu& glu, double g, double u) {
  if (is_gelu(glu)) return {gelu_of(glu, g).slope * u, gelu_of(glu, g).value};
  const bool clamped = glu.form == Glu::kClamped;
  const double a = clamped ? glu.alpha : 1.0;
  const double cut_g = clamped && g > glu.limit ? glu.limit : g;
  const double s = sigmoid(a * cut_g);
  const double slope = s + cut_g * a * s * (1 - s);
  if (!clamped) return {u * slope, g * s};
  const double cut_u = u < -glu.limit ? -glu.limit : (u > glu.limit ? glu.limit : u);
  const bool g_passes = g <= glu.limit;
  const bool u_passes = u >= -glu.limit && u <= glu.limit;
  return {g_passes ? (cut_u + 1) * slope : 0.0, u_passes ? cut_g * s : 0.0};
}

inline const double* expert_matrix(const Vector& stacked, std::int64_t expert, int rows, int cols) {
  return stacked.data() + static_cast<std::size_t>(expert) * rows * cols;
}
inline double* expert_matrix(Vector& stacked, std::int64_t expert, int rows, int cols) {
  return stacked.data() + static_cast<std::size_t>(expert) * rows * cols;
}

// out += bias[expert], where there is one.
inline void add_bias(const Vector& bias, std::int64_t expert, Vector& out) {
  if (bias.empty()) return;
  const double* row = expert_matrix(bias, expert, 1, static_cast<int>(out.size()));
  for (std::size_t n = 0; n < out.size(); ++n) out[n] += row[n];
}

// grad_bias[expert] += grad, where there is one.
inline void add_to_expert(Vector& grad_bias, std::int64_t expert, const Vector& grad) {
  if (grad_bias.empty()) return;
  double* row = expert_matrix(grad_bias, expert, 1, static_cast<int>(grad.size()));
  for (std::size_t n = 0; n < grad.size(); ++n) row[n] += grad[n];
}

// What one route (a token with one of its experts) computes on the way.
struct Route {
  std::int64_t expert = 0;
  Vector x, u_gate, u_up, g, u, h, u_down, d;
};

inline bool is_skipped(const Layer& layer, std::int64_t id) {
  return id < 0 || id >= layer.experts;
}

inline Vector row_of(const Vector& matrix, int row, int cols) {
  const auto begin = matrix.begin() + static_cast<std::ptrdiff_t>(row) * cols;
  return Vector(begin, begin + cols);
}

// out += scaling (v A^T) B^T; returns v A^T
template <class Hook>
Vector add_lora(const Adapter& lora, std::int64_t expert, int in, int out_features, const Vector& v,
                Vector& out, Hook& hook) {
  Vector u = times(expert_matrix(lora.a, expert, lora.rank, in), lora.rank, in, v);  // [r]
  apply(hook, Site::kInterior, u);
  add_scaled(out, lora.scaling,
             times(expert_matrix(lora.b, expert, out_features, lora.rank), out_features, lora.rank, u));
  return u;
}

template <class Hook>
Route forward_route(const Layer& layer, const Vector& x, std::int64_t expert, Hook& hook) {
  const int h = layer.hidden;
  const int i = layer.intermediate;
  Route r;
  r.expert = expert;
  r.x = x;
  r.g = times(expert_matrix(layer.gate, expert, i, h), i, h, x);
  r.u_gate = add_lora(layer.lora_gate, expert, h, i, x, r.g, hook);
  r.u = times(expert_matrix(layer.up, expert, i, h), i, h, x);
  r.u_up = add_lora(layer.lora_up, expert, h, i, x, r.u, hook);
  add_bias(layer.gate_bias, expert, r.g);
  add_bias(layer.up_bias, expert, r.u);
  apply(hook, Site::kInterior, r.g);
  apply(hook, Site::kInterior, r.u);
  r.h.resize(static_cast<std::size_t>(i));
  for (int n = 0; n < i; ++n) r.h[n] = glu_forward(layer.glu, r.g[n], r.u[n]);
  apply(hook, Site::kInterior, r.h);
  r.d = times(expert_matrix(layer.down, expert, h, i), h, i, r.h);
  r.u_down = add_lora(layer.lora_down, expert, i, h, r.h, r.d, hook);
  add_bias(layer.down_bias, expert, r.d);
  apply(hook, Site::kRow, r.d);
  return r;
}

// Through one adapted linear layer, out = W v + scaling B (A v) with u = A v kept: adds to grad_a, grad_b and, where
// it is wanted (not empty), to the gradient of W; returns the gradient of v.
template <class Hook>
Vector backward_linear(const Vector& weight, const Adapter& lora, std::int64_t expert, int in, int out_features,
                       const Vector& v, const Vector& u, const Vector& grad_out, Vector& grad_a, Vector& grad_b,
                       Vector& grad_weight, Hook& hook) {
  if (!grad_weight.empty()) add_outer(expert_matrix(grad_weight, expert, out_features, in), 1.0, grad_out, v);
  Vector grad_v = transposed_times(expert_matrix(weight, expert, out_features, in), out_features, in, grad_out);
  if (lora.rank == 0) return grad_v;
  const double* a = expert_matrix(lora.a, expert, lora.rank, in);
  const double* b = expert_matrix(lora.b, expert, out_features, lora.rank);
  Vector grad_u = transposed_times(b, out_features, lora.rank, grad_out);  // [r]
  apply(hook, Site::kInterior, grad_u);
  add_outer(expert_matrix(grad_b, expert, out_features, lora.rank), lora.scaling, grad_out, u);
  add_outer(expert_matrix(grad_a, expert, lora.rank, in), lora.scaling, grad_u, v);
  add_scaled(grad_v, lora.scaling, transposed_times(a, lora.rank, in, grad_u));
  return grad_v;
}

// Adds one route's part to every gradient; returns the gradient of its routing weight.
template <class Hook>
double backward_route(const Layer& layer, const Route& r, double weight, const Vector& grad_y, Vector& grad_x,
                      Results& out, Hook& hook) {
  const int h = layer.hidden;
  const int i = layer.intermediate;
  double grad_w = 0;
  for (int n = 0; n < h; ++n) grad_w += grad_y[n] * r.d[n];
  Vector grad_d = grad_y;  // [H]
  for (double& value : grad_d) value *= weight;
  apply(hook, Site::kInterior, grad_d);
  add_to_expert(out[kDownBias], r.expert, grad_d);
  Vector grad_h = backward_linear(layer.down, layer.lora_down, r.expert, i, h, r.h, r.u_down, grad_d,
                                  out[kDownA], out[kDownB], out[kDownWeight], hook);  // [I]
  apply(hook, Site::kInterior, grad_h);
  Vector grad_g(static_cast<std::size_t>(i));
  Vector grad_u(static_cast<std::size_t>(i));
  for (int n = 0; n < i; ++n) {
    const GluGradient d = glu_backward(layer.glu, r.g[n], r.u[n]);
    grad_g[n] = grad_h[n] * d.g;
    grad_u[n] = grad_h[n] * d.u;
  }
  apply(hook, Site::kInterior, grad_g);
  apply(hook, Site::kInterior, grad_u);
  add_to_expert(out[kGateBias], r.expert, grad_g);
  add_to_expert(out[kUpBias], r.expert, grad_u);
  Vector& grad_up_a = layer.shared_a ? out[kGateA] : out[kUpA];
  Vector of_gate = backward_linear(layer.gate, layer.lora_gate, r.expert, h, i, r.x, r.u_gate, grad_g,
                                   out[kGateA], out[kGateB], out[kGateWeight], hook);
  add_scaled(of_gate, 1.0,
             backward_linear(layer.up, layer.lora_up, r.expert, h, i, r.x, r.u_up, grad_u, grad_up_a, out[kUpB],
                             out[kUpWeight], hook));
  apply(hook, Site::kRow, of_gate);
  add_scaled(grad_x, 1.0, of_gate);
  return grad_w;
}

inline Results zero_results(const Layer& layer, const Batch& batch) {
  Results out;
  const auto zeros = [](const Vector& like) { return Vector(like.size(), 0.0); };
  out[kY] = out[kGradX] = zeros(batch.x);
  out[kGradW] = zeros(batch.weights);
  out[kGateA] = zeros(layer.lora_gate.a);
  out[kGateB] = zeros(layer.lora_gate.b);
  if (!layer.shared_a) out[kUpA] = zeros(layer.lora_up.a);
  out[kUpB] = zeros(layer.lora_up.b);
  out[kDownA] = zeros(layer.lora_down.a);
  out[kDownB] = zeros(layer.lora_down.b);
  out[kGateBias] = zeros(layer.gate_bias);
  out[kUpBias] = zeros(layer.up_bias);
  out[kDownBias] = zeros(layer.down_bias);
  if (!layer.trains_base) return out;
  out[kGateWeight] = zeros(layer.gate);
  out[kUpWeight] = zeros(layer.up);
  out[kDownWeight] = zeros(layer.down);
  return out;
}

template <class Hook>
void apply_to_inputs(Layer& layer, Batch& batch, Hook& hook) {
  apply(hook, Site::kX, batch.x);
  apply(hook, Site::kGradY, batch.grad_y);
  apply(hook, Site::kFactor, layer.lora_gate.a);
  if (layer.shared_a) {
    layer.lora_up.a = layer.lora_gate.a;
  } else {
    apply(hook, Site::kFactor, layer.lora_up.a);
  }
  for (Vector* factor : {&layer.lora_gate.b, &layer.lora_up.b, &layer.lora_down.a, &layer.lora_down.b}) {
    apply(hook, Site::kFactor, *factor);
  }
}

template <class Hook>
void apply_to_results(Results& out, Hook& hook) {
  apply(hook, Site::kY, out[kY]);
  apply(hook, Site::kGradX, out[kGradX]);
  apply(hook, Site::kGradW, out[kGradW]);
  for (std::size_t t = kGateA; t < kTensors; ++t) apply(hook, Site::kGradFactor, out[t]);
}

// One forward and its backward. By value: hooks may change the inputs.
template <class Hook>
Results step(Layer layer, Batch batch, Hook& hook) {
  Results out = zero_results(layer, batch);
  apply_to_inputs(layer, batch, hook);
  const int h = layer.hidden;
  for (int t = 0; t < batch.tokens; ++t) {
    const Vector x = row_of(batch.x, t, h);
    const Vector grad_y = row_of(batch.grad_y, t, h);
    Vector y(static_cast<std::size_t>(h), 0.0);
    Vector grad_x(static_cast<std::size_t>(h), 0.0);
    for (int slot = 0; slot < batch.top_k; ++slot) {
      const std::size_t at = static_cast<std::size_t>(t) * batch.top_k + slot;
      if (is_skipped(layer, batch.ids[at])) continue;
      const Route route = forward_route(layer, x, batch.ids[at], hook);
      add_scaled(y, batch.weights[at], route.d);
      out[kGradW][at] = backward_route(layer, route, batch.weights[at], grad_y, grad_x, out, hook);
    }
    std::copy(y.begin(), y.end(), out[kY].begin() + static_cast<std::ptrdiff_t>(t) * h);
    std::copy(grad_x.begin(), grad_x.end(), out[kGradX].begin() + static_cast<std::ptrdiff_t>(t) * h);
  }
  apply_to_results(out, hook);
  return out;
}

inline Results step(const Layer& layer, const Batch& batch) {
  Exact exact;
  return step(layer, batch, exact);
}

}  // namespace reference
