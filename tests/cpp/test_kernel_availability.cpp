// Kernels are available where the operating system says that the CPU has their instructions. All other tests
// of a kernel are skipped where it is not: one that refused everywhere would fail none of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <set>
#include <sstream>
#include <string>

#include "cpuinfo.hpp"
#include "emulation.hpp"
#include "moe.hpp"

namespace sft_test {
namespace {

class KernelAvailability : public testing::Test {
 protected:
  void SetUp() override {
    const auto flags = cpuinfo("flags");
    if (!flags) GTEST_SKIP() << "/proc/cpuinfo has no flags to compare with";
    std::istringstream words(*flags);
    flags_ = {std::istream_iterator<std::string>(words), {}};
  }
  bool cpu_has(std::initializer_list<const char*> flags) const {
    return std::all_of(flags.begin(), flags.end(), [this](const char* flag) { return flags_.count(flag) > 0; });
  }
  bool has_avx2() const { return cpu_has({"avx2", "fma"}); }
#ifdef SFT_TEST_SOFT_AVX512  // in software, made of AVX2
  bool has_avx512() const { return has_avx2(); }
  bool has_avx512_bf16() const { return has_avx2(); }
#else
  bool has_avx512() const { return cpu_has({"fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"}); }
  bool has_avx512_bf16() const { return has_avx512() && cpu_has({"avx512_bf16"}); }
#endif

 private:
  std::set<std::string> flags_;
};

// What kernels do in another way on some CPUs is told by the vendor and, of AMD's, by the family.
TEST(CpuFeatures, WhoReadsRowsInWhichWay) {
  const auto vendor = cpuinfo("vendor_id"), family = cpuinfo("cpu family");
  if (!vendor || !family) GTEST_SKIP() << "/proc/cpuinfo names no vendor or family";
  const amx_sft_moe::CpuFeatures found = amx_sft_moe::arch::read_cpu_features();
  EXPECT_EQ(*vendor == "GenuineIntel", found.follows_rows) << *vendor;
  const bool zen5 = *vendor == "AuthenticAMD" && std::stoi(*family) >= 26;
  EXPECT_EQ(zen5, found.loses_requests) << *vendor << ", family " << *family;
  EXPECT_EQ(zen5, found.hides_page_walks) << *vendor << ", family " << *family;
  EXPECT_EQ(!zen5, amx_sft_moe::arch::translates_together());
}

TEST_F(KernelAvailability, Portable) {
  EXPECT_EQ(PortableBf16::refusal(), "");
  EXPECT_EQ(PortableFp32::refusal(), "");
}

TEST_F(KernelAvailability, Avx2) {
  if (!has_avx2()) GTEST_SKIP() << "no AVX2 with FMA in /proc/cpuinfo";
  EXPECT_EQ(Avx2Bf16::refusal(), "");
  EXPECT_EQ(Avx2Fp32::refusal(), "");
}

TEST_F(KernelAvailability, Avx512) {
  if (!has_avx512()) GTEST_SKIP() << "no AVX512 F, BW, DQ and VL in /proc/cpuinfo";
  EXPECT_EQ(Avx512WidenedBf16::refusal(), "");
  EXPECT_EQ(Avx512Fp32::refusal(), "");
}

TEST_F(KernelAvailability, Avx512Bf16) {
  if (!has_avx512_bf16()) GTEST_SKIP() << "no AVX512-BF16 in /proc/cpuinfo";
  EXPECT_EQ(Avx512Bf16::refusal(), "");
}

// On a CPU with AMX its own instructions, which the operating system may still refuse to a process.
TEST_F(KernelAvailability, AmxBf16) {
  if (!has_avx512()) GTEST_SKIP() << "no AVX512 beside AMX in /proc/cpuinfo";
  const bool real = cpu_has({"amx_tile", "amx_bf16"});
#ifdef SFT_TEST_HAS_AMX_EMULATOR
  if (!real) {
    EXPECT_TRUE(amx_is_emulated()) << "main() has not installed the emulator";
  }
#else
  if (!real) GTEST_SKIP() << "no AMX-BF16 in /proc/cpuinfo, and no emulator of it is linked";
#endif
  const std::string refusal = AmxBf16::refusal();
  if (real && refusal.find("permission") != std::string::npos) GTEST_SKIP() << refusal;
  EXPECT_EQ(refusal, "");
}

}  // namespace
}  // namespace sft_test
