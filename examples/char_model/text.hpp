// Real text as symbols: what is read, how it is cut into windows, which part is held out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace char_model {

// Some symbols of context for each of `count` predictions, and what comes next.
struct Batch {
  std::size_t count = 0;
  std::vector<std::size_t> context;  // [count, window]
  std::vector<std::size_t> next;     // [count]
};

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("text: cannot read " + path.string());
  return {std::istreambuf_iterator<char>(file), {}};
}

// Every Debian and Ubuntu has the texts of the common licences: English prose, 240 KB, the same on each
// machine.
inline std::string read_licences() {
  const std::filesystem::path folder = "/usr/share/common-licenses";
  std::vector<std::filesystem::path> files;
  if (std::filesystem::is_directory(folder)) {
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      if (!entry.is_symlink() && entry.is_regular_file()) files.push_back(entry.path());
    }
  }
  if (files.empty()) throw std::runtime_error("text: " + folder.string() + " has no files; give --text FILE");
  std::sort(files.begin(), files.end());
  std::string text;
  for (const auto& file : files) text += read_file(file);
  return text;
}

class Text {
 public:
  // Each byte that occurs is a symbol. The last tenth is held out: with the licences, mostly the Mozilla Public
  // Licence 2.0, of which the rest has no other copy.
  Text(const std::string& bytes, std::size_t window) : window_(window) {
    std::vector<std::size_t> symbol_of(256, 0);
    for (const char c : bytes) symbol_of[static_cast<unsigned char>(c)] = 1;
    for (std::size_t byte = 0; byte < symbol_of.size(); ++byte) {
      if (symbol_of[byte] == 0) continue;
      symbol_of[byte] = alphabet_.size();
      alphabet_.push_back(static_cast<char>(byte));
    }
    for (const char c : bytes) symbols_.push_back(symbol_of[static_cast<unsigned char>(c)]);
    held_out_ = symbols_.size() / 10 * 9;
    if (symbols_.size() - held_out_ < 4 * window) {
      throw std::runtime_error("text: expected at least " + std::to_string(40 * window) + " bytes, got " +
                               std::to_string(bytes.size()));
    }
  }

  std::size_t window() const { return window_; }
  std::size_t alphabet_size() const { return alphabet_.size(); }
  std::size_t size() const { return symbols_.size(); }
  char letter(std::size_t symbol) const { return alphabet_[symbol]; }

  Batch training(std::size_t count, std::mt19937_64& random) const {
    Batch batch;
    for (std::size_t i = 0; i < count; ++i) append(batch, random() % (held_out_ - window_));
    return batch;
  }
  // The same each time: `count` places spread evenly over the held-out text.
  Batch held_out(std::size_t count) const {
    Batch batch;
    const std::size_t places = symbols_.size() - held_out_ - window_;
    for (std::size_t i = 0; i < count; ++i) append(batch, held_out_ + i * places / count);
    return batch;
  }

 private:
  void append(Batch& batch, std::size_t place) const {
    for (std::size_t i = 0; i < window_; ++i) batch.context.push_back(symbols_[place + i]);
    batch.next.push_back(symbols_[place + window_]);
    ++batch.count;
  }

  std::size_t window_;
  std::string alphabet_;
  std::vector<std::size_t> symbols_;
  std::size_t held_out_ = 0;
};

}  // namespace char_model
