// The layer's step in float64, route by route and with plain loops: what the operator is checked against.
#pragma once

#include <cmath>

#include "layer.hpp"

namespace profile_layer {

using Vector = std::vector<double>;

// out += scale M v, or with Transposed out += scale M^T v, for a row-major M [rows, cols].
template <bool Transposed, class T>
void add_product(const T* m, index_t rows, index_t cols, const Vector& v, double scale, Vector& out) {
  for (index_t r = 0; r < rows; ++r) {
    const T* row = m + r * cols;
    double sum = 0;
    for (index_t c = 0; c < cols; ++c) {
      const auto value = static_cast<double>(to_float(row[c]));
      if constexpr (Transposed) {
        out[size(c)] += scale * v[size(r)] * value;
      } else {
        sum += value * v[size(c)];
      }
    }
    if constexpr (!Transposed) out[size(r)] += scale * sum;
  }
}

struct Reference {
  std::vector<double> y, grad_x, grad_weights;
  std::array<std::vector<double>, kFactors> grads;

  Reference(const Layer& layer, const Batch& batch)
      : y(batch.y.size()), grad_x(batch.x.size()), grad_weights(batch.weights.size()), layer_(layer) {
    for (std::size_t f = 0; f < kFactors; ++f) grads[f].resize(batch.grads[f].size());
    for (index_t t = 0; t < batch.tokens; ++t) {
      for (index_t j = 0; j < batch.top_k; ++j) add_route(batch, t, t * batch.top_k + j);
    }
  }

 private:
  // One projection W v + s B A v, its u = A v, and what flows back through it.
  struct Projection {
    const Layer& layer;
    const bf16* weight;
    int factor;  // of A; B is the next
    index_t expert, out, in;
    Vector u, value;

    Projection(const Layer& of, const std::vector<bf16>& weights, int f, index_t e, const Vector& v)
        : layer(of),
          factor(f),
          expert(e),
          out(of.rows(f + 1)),
          in(of.cols(f)),
          u(size(of.rank)),
          value(size(out)) {
      weight = weights.data() + e * out * in;
      add_product<false>(a(), layer.rank, in, v, 1, u);
      add_product<false>(weight, out, in, v, 1, value);
      add_product<false>(b(), out, layer.rank, u, layer.scaling, value);
    }
    const float* a() const { return layer.factors[size(factor)].data() + expert * layer.rank * in; }
    const float* b() const { return layer.factors[size(factor + 1)].data() + expert * out * layer.rank; }

    // Adds the gradient of the input, and those of the factors with a weight of their own.
    void backward(const Vector& grad, const Vector& input, double factor_weight, Vector& grad_input,
                  std::array<std::vector<double>, kFactors>& to) const {
      Vector v(size(layer.rank));
      add_product<true>(b(), out, layer.rank, grad, layer.scaling, v);
      add_product<true>(weight, out, in, grad, 1, grad_input);
      add_product<true>(a(), layer.rank, in, v, 1, grad_input);
      double* grad_a = to[size(factor)].data() + expert * layer.rank * in;
      double* grad_b = to[size(factor + 1)].data() + expert * out * layer.rank;
      for (index_t r = 0; r < layer.rank; ++r) {
        for (index_t c = 0; c < in; ++c) grad_a[r * in + c] += factor_weight * v[size(r)] * input[size(c)];
        for (index_t o = 0; o < out; ++o) {
          grad_b[o * layer.rank + r] += factor_weight * layer.scaling * grad[size(o)] * u[size(r)];
        }
      }
    }
  };

  void add_route(const Batch& batch, index_t token, index_t route) {
    const index_t expert = batch.ids[size(route)];
    const double weight = batch.weights[size(route)];
    const auto row = static_cast<std::ptrdiff_t>(token * batch.hidden);
    const Vector x(batch.x.begin() + row, batch.x.begin() + row + batch.hidden);
    const Vector p(batch.grad_y.begin() + row, batch.grad_y.begin() + row + batch.hidden);
    const Projection gate(layer_, layer_.gate, 0, expert, x), up(layer_, layer_.up, 2, expert, x);
    const std::size_t n = gate.value.size();
    Vector h(n), grad_h(n), grad_gate(n), grad_up(n), grad_of_x(x.size());
    const auto sigmoid = [](double g) { return 1 / (1 + std::exp(-g)); };
    for (std::size_t i = 0; i < n; ++i) h[i] = gate.value[i] * sigmoid(gate.value[i]) * up.value[i];
    const Projection down(layer_, layer_.down, 4, expert, h);
    down.backward(p, h, weight, grad_h, grads);  // of the unweighted output
    for (std::size_t i = 0; i < n; ++i) {
      grad_weights[size(route)] += grad_h[i] * h[i];
      const double g = gate.value[i], s = sigmoid(g);
      grad_gate[i] = weight * grad_h[i] * up.value[i] * s * (1 + g * (1 - s));
      grad_up[i] = weight * grad_h[i] * g * s;
    }
    gate.backward(grad_gate, x, 1, grad_of_x, grads);
    up.backward(grad_up, x, 1, grad_of_x, grads);
    for (std::size_t i = 0; i < x.size(); ++i) {
      y[size(row) + i] += weight * down.value[i];
      grad_x[size(row) + i] += grad_of_x[i];
    }
  }

  const Layer& layer_;
};

// Norm of the error over the norm of what is right; the former alone where the latter is 0.
inline double relative_error(const std::vector<float>& found, const std::vector<double>& exact) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    error += std::pow(static_cast<double>(found[i]) - exact[i], 2);
    norm += exact[i] * exact[i];
  }
  return std::sqrt(norm > 0 ? error / norm : error);
}

// NaN where either is, which std::max would lose.
inline double larger(double a, double b) {
  return std::isnan(a) || a >= b ? a : b;
}

// The largest of all results of a step; NaN where any of them has one.
inline double largest_error(const Batch& batch, const Reference& exact) {
  double worst = relative_error(batch.y, exact.y);
  worst = larger(worst, relative_error(batch.grad_x, exact.grad_x));
  worst = larger(worst, relative_error(batch.grad_weights, exact.grad_weights));
  for (std::size_t f = 0; f < kFactors; ++f) {
    worst = larger(worst, relative_error(batch.grads[f], exact.grads[f]));
  }
  return worst;
}

}  // namespace profile_layer
