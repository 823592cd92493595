// The whole model: embeddings of a window of characters, mixed by one linear layer into the state of a token;
// two MoE layers, each added to what it reads; logits of the next character.
//
//     a = mix(concat of embeddings)          [T, H]
//     a = a + moe(norm(a))                   twice
//     logits = head(norm(a))                 [T, symbols]
#pragma once

#include <deque>

#include "moe_layer.hpp"
#include "text.hpp"

namespace char_model {

struct ModelShape {
  std::size_t window = 16, symbols = 0, embedding = 24, layers = 2;
  MoeShape moe;
};

class Model {
 public:
  Model(const ModelShape& shape, std::mt19937_64& random)
      : shape_(shape),
        embedding_("embedding", shape.symbols * shape.embedding),
        mixer_("mixer", shape.window * shape.embedding, hidden(), random),
        head_("head", hidden(), shape.symbols, random),
        norm_{hidden()} {
    fill_normal(embedding_.value, 1.0F, random);
    for (std::size_t l = 0; l < shape.layers; ++l)
      layers_.emplace_back("layer " + std::to_string(l), shape.moe, random);
  }

  void use_kernel(const std::string& kernel, sft::DType weights) {
    const auto workspace = std::make_shared<sft::Workspace>();
    for (MoeLayer& layer : layers_) layer.use_kernel(kernel, weights, workspace);
  }

  enum class Mode { kEvaluate, kTrain, kEvaluateAtLastRoutes };

  // Mean cross-entropy of what comes next, in nats. Training keeps what backward() needs.
  double loss(const Batch& batch, Mode mode = Mode::kEvaluate) {
    logits_ = forward(batch.context, mode);
    return cross_entropy(logits_, batch.next);
  }

  // Gradients of the last loss(batch, kTrain) into every parameter's grad.
  void backward(const Batch& batch) {
    Floats grad(states_.back().size());
    norm_.backward(states_.back(), head_.backward(normed_.back(), logits_), grad);
    for (std::size_t l = layers_.size(); l-- > 0;) {
      norm_.backward(states_[l], layers_[l].backward(normed_[l], grad), grad);
    }
    scatter(batch.context, mixer_.backward(window_, grad));
  }

  // Logits of the symbol that follows each window of `context`, [T, symbols].
  Floats forward(const std::vector<std::size_t>& context, Mode mode = Mode::kEvaluate) {
    window_ = gather(context);
    states_ = {mixer_.forward(window_)};
    normed_.clear();
    for (MoeLayer& layer : layers_) {
      normed_.push_back(norm_.forward(states_.back()));
      Floats state = layer.forward(normed_.back(), mode == Mode::kTrain, mode == Mode::kEvaluateAtLastRoutes);
      add_scaled(state.data(), 1.0F, states_.back().data(), state.size());
      states_.push_back(std::move(state));
    }
    normed_.push_back(norm_.forward(states_.back()));
    return head_.forward(normed_.back());
  }

  std::vector<Parameter*> parameters() {
    std::vector<Parameter*> all{&embedding_, &mixer_.weight};
    for (MoeLayer& layer : layers_) {
      for (Parameter* parameter : layer.parameters()) all.push_back(parameter);
    }
    all.push_back(&head_.weight);
    return all;
  }
  const sft::AnySftMoe& experts(std::size_t layer) const { return layers_[layer].experts(); }

 private:
  std::size_t hidden() const { return static_cast<std::size_t>(shape_.moe.hidden); }

  Floats gather(const std::vector<std::size_t>& context) const {  // [T * window] -> [T, window * embedding]
    Floats rows(context.size() * shape_.embedding);
    for (std::size_t i = 0; i < context.size(); ++i) {
      std::copy_n(&embedding_.value[context[i] * shape_.embedding], shape_.embedding,
                  &rows[i * shape_.embedding]);
    }
    return rows;
  }
  void scatter(const std::vector<std::size_t>& context, const Floats& grad_rows) {
    embedding_.grad.assign(embedding_.grad.size(), 0.0F);
    for (std::size_t i = 0; i < context.size(); ++i) {
      add_scaled(&embedding_.grad[context[i] * shape_.embedding], 1.0F, &grad_rows[i * shape_.embedding],
                 shape_.embedding);
    }
  }

  ModelShape shape_;
  Parameter embedding_;  // [symbols, embedding]
  Linear mixer_, head_;
  RmsNorm norm_;
  std::deque<MoeLayer> layers_;  // never moved: operators keep views of their factors

  // Of the last forward, for the backward.
  Floats window_;                        // [T, window * embedding]
  std::vector<Floats> states_, normed_;  // before each layer and before the head, [T, H]
  Floats logits_;                        // [T, symbols]; after loss() their gradient
};

}  // namespace char_model
