// The parts of the model beside the experts, forward and backward: linear layer, RMS norm, cross-entropy. Loops
// over OpenMP threads give each output to one thread, so results do not depend on their number.
#pragma once

#include <array>
#include <cmath>

#include "parameters.hpp"

namespace char_model {

// 16 partial sums: a compiler may keep them in vector registers without reordering anything.
inline float dot(const float* a, const float* b, std::size_t n) {
  std::array<float, 16> lanes{};
  std::size_t i = 0;
  for (; i + lanes.size() <= n; i += lanes.size()) {
    for (std::size_t lane = 0; lane < lanes.size(); ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  }
  float sum = 0.0F;
  for (; i < n; ++i) sum += a[i] * b[i];
  for (const float lane : lanes) sum += lane;
  return sum;
}

inline void add_scaled(float* to, float scale, const float* from, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) to[i] += scale * from[i];
}

// y = x W^T with W [out, in].
class Linear {
 public:
  Linear(std::string name, std::size_t in, std::size_t out, std::mt19937_64& random)
      : weight(std::move(name), out * in), in_(in), out_(out) {
    fill_normal(weight.value, 1.0F / std::sqrt(static_cast<float>(in)), random);
  }

  Floats forward(const Floats& x) const {  // [T, in] -> [T, out]
    const std::size_t rows = x.size() / in_;
    Floats y(rows * out_);
#pragma omp parallel for schedule(static)
    for (std::size_t t = 0; t < rows; ++t) {
      for (std::size_t o = 0; o < out_; ++o) y[t * out_ + o] = dot(&x[t * in_], &weight.value[o * in_], in_);
    }
    return y;
  }

  // grad_x [T, in]; weight.grad is overwritten.
  Floats backward(const Floats& x, const Floats& grad_y) {
    const std::size_t rows = x.size() / in_;
    Floats grad_x(rows * in_);
#pragma omp parallel for schedule(static)
    for (std::size_t t = 0; t < rows; ++t) {
      for (std::size_t o = 0; o < out_; ++o) {
        add_scaled(&grad_x[t * in_], grad_y[t * out_ + o], &weight.value[o * in_], in_);
      }
    }
    weight.grad.assign(weight.grad.size(), 0.0F);
#pragma omp parallel for schedule(static)
    for (std::size_t o = 0; o < out_; ++o) {
      for (std::size_t t = 0; t < rows; ++t) {
        add_scaled(&weight.grad[o * in_], grad_y[t * out_ + o], &x[t * in_], in_);
      }
    }
    return grad_x;
  }

  Parameter weight;

 private:
  std::size_t in_, out_;
};

// y = x / sqrt(mean(x^2) + epsilon), row by row.
struct RmsNorm {
  std::size_t width;
  static constexpr float kEpsilon = 1e-5F;

  float inverse(const float* x) const {
    return 1.0F / std::sqrt(dot(x, x, width) / static_cast<float>(width) + kEpsilon);
  }
  Floats forward(const Floats& x) const {
    Floats y(x.size());
    for (std::size_t row = 0; row < x.size(); row += width)
      add_scaled(&y[row], inverse(&x[row]), &x[row], width);
    return y;
  }
  // Adds to grad_x.
  void backward(const Floats& x, const Floats& grad_y, Floats& grad_x) const {
    for (std::size_t row = 0; row < x.size(); row += width) {
      const float scale = inverse(&x[row]);
      const float along = dot(&x[row], &grad_y[row], width) / static_cast<float>(width);
      add_scaled(&grad_x[row], scale, &grad_y[row], width);
      add_scaled(&grad_x[row], -along * scale * scale * scale, &x[row], width);
    }
  }
};

// In place: logits become probabilities.
inline void softmax(float* logits, std::size_t n) {
  float largest = logits[0];
  for (std::size_t i = 1; i < n; ++i) largest = std::fmax(largest, logits[i]);
  float sum = 0.0F;
  for (std::size_t i = 0; i < n; ++i) sum += logits[i] = std::exp(logits[i] - largest);
  for (std::size_t i = 0; i < n; ++i) logits[i] /= sum;
}

// Mean over the rows, in double: the gradient check takes small differences of it. `logits` [T, classes] become
// their own gradient.
inline double cross_entropy(Floats& logits, const std::vector<std::size_t>& wanted) {
  const std::size_t classes = logits.size() / wanted.size();
  double loss = 0;
  for (std::size_t t = 0; t < wanted.size(); ++t) {
    float* row = &logits[t * classes];
    double sum = 0;
    for (std::size_t i = 0; i < classes; ++i) sum += std::exp(static_cast<double>(row[i]));
    loss += std::log(sum) - static_cast<double>(row[wanted[t]]);
    softmax(row, classes);
    row[wanted[t]] -= 1.0F;
    for (std::size_t i = 0; i < classes; ++i) row[i] /= static_cast<float>(wanted.size());
  }
  return loss / static_cast<double>(wanted.size());
}

}  // namespace char_model
