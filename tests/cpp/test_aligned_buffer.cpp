// AlignedBuffer: where it begins, which pages it asks for, and what stays when memory runs out.
#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <limits>
#include <new>
#include <sstream>
#include <string>
#include <utility>

#include "allocation_counter.hpp"
#include "amx_sft_moe/amx_sft_moe.hpp"

namespace {

using amx_sft_moe::AlignedBuffer;
using amx_sft_moe::index_t;
using amx_sft_moe::kCacheLine;
using amx_sft_moe::kHugePage;

constexpr auto kHugeFloats = static_cast<index_t>(kHugePage / sizeof(float));

std::uintptr_t address(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p);
}

// The kernel's flags of the mapping that `p` lies in (proc(5), VmFlags); empty where it does not say.
std::string flags_of_mapping(const void* p) {
  std::ifstream maps("/proc/self/smaps");
  bool here = false;
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0, end = 0;
    char dash = 0;
    if (std::istringstream head(line); head >> std::hex >> begin >> dash >> end && dash == '-') {
      here = begin <= address(p) && address(p) < end;
    } else if (here && line.starts_with("VmFlags:")) {
      return line + " ";
    }
  }
  return "";
}

TEST(AlignedBuffer, BeginsWithACacheLineOrAHugePage) {
  for (const index_t size : {index_t{1}, index_t{1000}, kHugeFloats - 1}) {
    EXPECT_EQ(address(AlignedBuffer<float>(size).data()) % kCacheLine, 0U) << size;
  }
  for (const index_t size : {kHugeFloats, kHugeFloats + 1, 3 * kHugeFloats}) {
    EXPECT_EQ(address(AlignedBuffer<float>(size).data()) % kHugePage, 0U) << size;
  }
}

TEST(AlignedBuffer, AsksForHugePagesFromTheFirstOn) {
  if (!std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled")) GTEST_SKIP() << "no huge pages here";
  const AlignedBuffer<float> small(kHugeFloats / 8), large(4 * kHugeFloats);
  if (flags_of_mapping(large.data()).empty()) GTEST_SKIP() << "the kernel tells no flags of mappings";
  EXPECT_NE(flags_of_mapping(large.data()).find(" hg "), std::string::npos);
  EXPECT_NE(flags_of_mapping(large.data() + 4 * kHugeFloats - 1).find(" hg "), std::string::npos);
  EXPECT_EQ(flags_of_mapping(small.data()).find(" hg "), std::string::npos);
}

TEST(AlignedBuffer, GrowsFromOneAlignmentToTheOther) {
  const std::int64_t before = sft_test::live_aligned_allocations();
  {
    AlignedBuffer<float> buffer(8);
    EXPECT_FALSE(buffer.reserve(8));
    EXPECT_TRUE(buffer.reserve(2 * kHugeFloats));
    EXPECT_EQ(buffer.capacity(), 2 * kHugeFloats);
    EXPECT_EQ(buffer.bytes(), static_cast<index_t>(2 * kHugePage));
    buffer[2 * kHugeFloats - 1] = 1.0F;
    EXPECT_FALSE(buffer.reserve(8)) << "it never shrinks";
    AlignedBuffer<float> moved = std::move(buffer), assigned(8);
    EXPECT_EQ(moved[2 * kHugeFloats - 1], 1.0F);
    assigned = std::move(moved);
    EXPECT_EQ(assigned[2 * kHugeFloats - 1], 1.0F);
    EXPECT_EQ(sft_test::live_aligned_allocations() - before, 1);
    EXPECT_TRUE(buffer.reserve(1)) << "it has nothing left";  // NOLINT(bugprone-use-after-move)
    EXPECT_TRUE(moved.reserve(1));                            // NOLINT(bugprone-use-after-move)
  }
  EXPECT_EQ(sft_test::live_aligned_allocations(), before);
}

TEST(AlignedBuffer, RefusesSizesThatHaveOverflowed) {
  AlignedBuffer<float> buffer(3);
  EXPECT_THROW(buffer.reserve(-1), std::bad_alloc);
  EXPECT_THROW(buffer.reserve(std::numeric_limits<index_t>::min()), std::bad_alloc);
  EXPECT_EQ(buffer.capacity(), 3);
  amx_sft_moe::gemm::Buffer untyped;
  EXPECT_THROW(untyped.as<float>(-1), std::bad_alloc);
  EXPECT_THROW(untyped.as<float>(std::numeric_limits<index_t>::min()), std::bad_alloc);
  EXPECT_THROW(untyped.as<float>(std::numeric_limits<index_t>::max() / 4 + 1), std::bad_alloc);
  EXPECT_EQ(untyped.bytes(), 0);
}

TEST(AlignedBuffer, IsAsItWasWhenMemoryRunsOut) {
  AlignedBuffer<float> buffer(8);
  buffer[7] = 3.0F;
  {
    const sft_test::FailingAllocation fails(0);
    EXPECT_THROW(buffer.reserve(kHugeFloats), std::bad_alloc);
  }
  EXPECT_THROW(buffer.reserve(std::numeric_limits<index_t>::max()), std::bad_alloc);
  amx_sft_moe::gemm::Buffer untyped;
  for (const index_t count : {std::numeric_limits<index_t>::max(), index_t{1} << 61, index_t{3} << 61})
    EXPECT_THROW(untyped.as<float>(count), std::bad_alloc);
  EXPECT_EQ(buffer.capacity(), 8);
  EXPECT_EQ(buffer[7], 3.0F);
}

}  // namespace
