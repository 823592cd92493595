// The fuzzer's input as a stream of decisions; when it is used up, every further one is the lowest.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sft_fuzz {

class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : data_(data), end_(data + size) {}

  bool empty() const { return data_ == end_; }
  // From low to high, both included; their distance is below 256.
  int in(int low, int high) { return low + next() % (high - low + 1); }
  bool flag() { return (next() & 1) != 0; }
  template <class T, std::size_t N>
  const T& one_of(const T (&choices)[N]) {
    return choices[static_cast<std::size_t>(in(0, static_cast<int>(N) - 1))];
  }
  unsigned seed() {
    const unsigned high = next();
    return high << 8 | next();
  }

 private:
  unsigned char next() { return empty() ? 0 : *data_++; }

  const std::uint8_t* data_;
  const std::uint8_t* end_;
};

}  // namespace sft_fuzz
