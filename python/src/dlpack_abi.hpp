// The part of DLPack's binary interface that the bindings read (https://github.com/dmlc/dlpack, version 1.x),
// and its table of C functions for tensors that are only looked at during a call.
#pragma once

#include <cstdint>

namespace amx_sft_moe::python::dlpack {

enum DeviceType : std::int32_t { kCpu = 1, kCudaHost = 3, kRocmHost = 11 };
enum TypeCode : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBool = 6 };
inline constexpr std::uint32_t kMajorVersion = 1;
inline constexpr std::uint64_t kFlagReadOnly = 1;

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

struct Device {
  std::int32_t type;
  std::int32_t id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // of elements; null before version 1.2 where contiguous
  std::uint64_t byte_offset;
};

// What a capsule named "dltensor" holds.
struct Managed {
  Tensor tensor;
  void* manager_context;
  void (*deleter)(Managed*);
};

// What a capsule named "dltensor_versioned" holds.
struct ManagedVersioned {
  Version version;
  void* manager_context;
  void (*deleter)(ManagedVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};

// What the capsule `type.__dlpack_c_exchange_api__`, named "dlpack_exchange_api", holds. Functions that are not
// used here are declared only to keep the layout.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  void (*managed_tensor_allocator)();
  void (*managed_tensor_from_py_object_no_sync)();
  void (*managed_tensor_to_py_object_no_sync)();
  // Fills a tensor that is valid until the caller returns; 0, or -1 with a Python exception set.
  int (*tensor_from_py_object_no_sync)(void* py_object, Tensor* out);
  void (*current_work_stream)();
};

}  // namespace amx_sft_moe::python::dlpack
