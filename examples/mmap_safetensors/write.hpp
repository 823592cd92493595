// A file of one layer with random experts, for where no model is at hand.
#pragma once

#include <fstream>
#include <random>

#include "experts_of_layer.hpp"

namespace mmap_safetensors {

// [E, 2I, H] and [E, H, I], as a model in memory has them.
template <class T>
struct RandomExperts {
  LayerShape shape;
  std::vector<T> gate_up, down;

  explicit RandomExperts(const LayerShape& of) : shape(of) {
    std::mt19937 random(1);
    const float scale = 1.0F / std::sqrt(static_cast<float>(shape.hidden));
    std::normal_distribution<float> normal(0.0F, scale);
    const auto fill = [&](std::vector<T>& values, index_t count) {
      values.resize(static_cast<std::size_t>(count));
      for (T& value : values) value = amx_sft_moe::from_float<T>(normal(random));
    };
    fill(gate_up, shape.experts * 2 * shape.intermediate * shape.hidden);
    fill(down, shape.experts * shape.hidden * shape.intermediate);
  }

  BaseWeights<T> weights() const {
    const auto& s = shape;
    const index_t half = s.intermediate * s.hidden;
    BaseWeights<T> base;
    base.gate = {gate_up.data(), nullptr, 2 * half, s.intermediate, s.hidden, s.hidden};
    base.up = {gate_up.data() + half, nullptr, 2 * half, s.intermediate, s.hidden, s.hidden};
    base.down = ExpertMatrices<const T>::stacked(down.data(), s.hidden, s.intermediate);
    return base;
  }
};

class Writer {
 public:
  void add(const std::string& name, const char* dtype, std::initializer_list<index_t> shape, const void* data,
           std::size_t bytes) {
    std::string sizes;
    for (const index_t n : shape) sizes += (sizes.empty() ? "" : ",") + std::to_string(n);
    header_ += (header_.empty() ? "{\"" : ",\"") + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" +
               sizes + "],\"data_offsets\":[" + std::to_string(at_) + "," + std::to_string(at_ + bytes) + "]}";
    parts_.emplace_back(static_cast<const char*>(data), bytes);
    at_ += bytes;
  }

  void write(const std::string& path) {
    header_ += '}';
    while (header_.size() % 8 != 0) header_ += ' ';  // the data begin aligned
    std::ofstream file(path, std::ios::binary);
    for (std::size_t i = 0; i < 8; ++i) file.put(static_cast<char>(header_.size() >> 8 * i & 0xff));
    file << header_;
    for (const std::string_view part : parts_) file << part;
    if (!file.flush()) throw Error(path + ": it cannot be written");
  }

 private:
  std::string header_;
  std::vector<std::string_view> parts_;
  std::size_t at_ = 0;
};

template <class T>
void write_layer(const std::string& path, index_t layer, const RandomExperts<T>& experts) {
  const LayerShape& s = experts.shape;
  const LayerNames names(layer);
  const char* dtype = kDTypeName<T>;
  Writer writer;
  if (s.fused) {
    writer.add(names.gate_up(), dtype, {s.experts, 2 * s.intermediate, s.hidden}, experts.gate_up.data(),
               experts.gate_up.size() * sizeof(T));
    writer.add(names.down(), dtype, {s.experts, s.hidden, s.intermediate}, experts.down.data(),
               experts.down.size() * sizeof(T));
  } else {
    const BaseWeights<T> base = experts.weights();
    const std::size_t bytes = static_cast<std::size_t>(s.intermediate * s.hidden) * sizeof(T);
    for (index_t e = 0; e < s.experts; ++e) {
      writer.add(names.of(e, "gate"), dtype, {s.intermediate, s.hidden}, base.gate[e].data, bytes);
      writer.add(names.of(e, "up"), dtype, {s.intermediate, s.hidden}, base.up[e].data, bytes);
      writer.add(names.of(e, "down"), dtype, {s.hidden, s.intermediate}, base.down[e].data, bytes);
    }
  }
  writer.write(path);
}

}  // namespace mmap_safetensors
