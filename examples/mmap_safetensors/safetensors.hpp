// A safetensors file, mapped read-only: 8 bytes of header length (little-endian), a JSON header, the data of
// all tensors one after the other. Nothing is copied, and no byte is trusted before it was checked.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <span>

#include "header_reader.hpp"

namespace mmap_safetensors {

struct Tensor {
  std::string dtype;  // as the file says: "BF16", "F32", ...
  std::vector<std::uint64_t> shape;
  std::uint64_t begin = 0, end = 0;  // bytes of the data part
};

inline std::uint64_t bytes_of(const std::string& name, const Tensor& tensor) {
  static const std::map<std::string, std::uint64_t> sizes{
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"I16", 2}, {"U16", 2}, {"F16", 2},
      {"BF16", 2}, {"I32", 4}, {"U32", 4}, {"F32", 4},     {"I64", 8},     {"U64", 8}, {"F64", 8}};
  const auto size = sizes.find(tensor.dtype);
  if (size == sizes.end()) throw Error(name + ": dtype " + tensor.dtype + " is not known");
  std::uint64_t bytes = size->second;
  for (const std::uint64_t n : tensor.shape) {
    if (__builtin_mul_overflow(bytes, n, &bytes)) throw Error(name + ": its shape has more than 2^64 bytes");
  }
  return bytes;
}

// The header's tensors by name; `data_bytes` is what follows the header. They fill it without holes or overlap.
inline std::map<std::string, Tensor> parse_header(std::string_view json, std::uint64_t data_bytes) {
  std::map<std::string, Tensor> tensors;
  HeaderReader reader(json);
  reader.object([&](const std::string& name) {
    if (name == "__metadata__") return reader.object([&](const std::string&) { reader.string(); });
    Tensor tensor;
    std::vector<std::uint64_t> offsets;
    reader.object([&](const std::string& key) {
      if (key == "dtype") {
        tensor.dtype = reader.string();
      } else if (key == "shape") {
        tensor.shape = reader.numbers();
      } else if (key == "data_offsets") {
        offsets = reader.numbers();
      } else {
        throw Error(name + ": expected dtype, shape and data_offsets, got " + key);
      }
    });
    if (offsets.size() != 2 || offsets[0] > offsets[1])
      throw Error(name + ": expected data_offsets [begin, end]");
    tensor.begin = offsets[0];
    tensor.end = offsets[1];
    if (tensor.end > data_bytes) {
      throw Error(name + ": expected an end within " + std::to_string(data_bytes) + " bytes of data, got " +
                  std::to_string(tensor.end));
    }
    if (const std::uint64_t bytes = bytes_of(name, tensor); bytes != tensor.end - tensor.begin) {
      throw Error(name + ": expected " + std::to_string(bytes) + " bytes for its shape, got " +
                  std::to_string(tensor.end - tensor.begin));
    }
    if (!tensors.emplace(name, tensor).second) throw Error(name + ": it is there twice");
  });
  reader.end();

  std::vector<const std::pair<const std::string, Tensor>*> by_place;
  by_place.reserve(tensors.size());
  for (const auto& entry : tensors) by_place.push_back(&entry);
  std::sort(by_place.begin(), by_place.end(), [](const auto* a, const auto* b) {
    return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
  });
  std::uint64_t expected = 0;
  for (const auto* entry : by_place) {
    if (entry->second.begin != expected) {
      throw Error(entry->first + ": expected its data at " + std::to_string(expected) + ", got " +
                  std::to_string(entry->second.begin) + " (tensors overlap or leave a hole)");
    }
    expected = entry->second.end;
  }
  if (expected != data_bytes)
    throw Error("data: expected " + std::to_string(expected) + " bytes, got " + std::to_string(data_bytes));
  return tensors;
}

// The bytes of a file, read-only, as long as this lives.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) throw Error(path + ": " + std::strerror(errno));
    struct stat status {};
    const bool known = ::fstat(file, &status) == 0;
    size_ = static_cast<std::size_t>(status.st_size);
    void* data = known && size_ > 0 ? ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
    ::close(file);  // the map keeps the file
    if (data == MAP_FAILED) throw Error(path + ": it cannot be mapped, or is empty");
    data_ = static_cast<const char*>(data);
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile() { ::munmap(const_cast<char*>(data_), size_); }

  std::string_view bytes() const { return {data_, size_}; }

 private:
  const char* data_ = nullptr;
  std::size_t size_ = 0;
};

class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path) : file_(path) {
    const std::string_view bytes = file_.bytes();
    std::uint64_t header = 0;
    if (bytes.size() < sizeof(header)) throw Error(path + ": expected at least 8 bytes");
    std::memcpy(&header, bytes.data(), sizeof(header));
    if (header > bytes.size() - sizeof(header)) {
      throw Error(path + ": expected a header within " + std::to_string(bytes.size()) +
                  " bytes, got a length of " + std::to_string(header));
    }
    data_ = bytes.substr(sizeof(header) + header);
    tensors_ = parse_header(bytes.substr(sizeof(header), header), data_.size());
  }

  bool has(const std::string& name) const { return tensors_.count(name) != 0; }
  const Tensor& at(const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) throw Error(name + ": no such tensor");
    return found->second;
  }
  // Where the elements of a tensor lie, which must have this type and shape.
  template <class T>
  const T* elements(const std::string& name, const char* dtype, const std::vector<std::uint64_t>& shape) const {
    const Tensor& tensor = at(name);
    if (tensor.dtype != dtype) throw Error(name + ": expected " + dtype + ", got " + tensor.dtype);
    if (tensor.shape != shape)
      throw Error(name + ": expected shape " + text(shape) + ", got " + text(tensor.shape));
    const char* begin = data_.data() + tensor.begin;
    if (reinterpret_cast<std::uintptr_t>(begin) % alignof(T) != 0) {
      throw Error(name + ": its elements are not aligned in the file");
    }
    return reinterpret_cast<const T*>(begin);
  }

 private:
  static std::string text(const std::vector<std::uint64_t>& shape) {
    std::string out = "[";
    for (const std::uint64_t n : shape) out += (out.size() > 1 ? ", " : "") + std::to_string(n);
    return out + "]";
  }

  MappedFile file_;
  std::string_view data_;
  std::map<std::string, Tensor> tensors_;
};

}  // namespace mmap_safetensors
