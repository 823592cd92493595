// A file system without locks: records that several threads append at the same time stay whole, and nothing that looks like a
// torn line is touched, for it may be what another writes just now.
#include <errno.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/resource.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "amx_sft_moe/profile/bounded_file.hpp"
#include "environment.hpp"

// Instead of the C library's, for this program.
extern "C" int flock(int /*file*/, int /*operation*/) noexcept {
  errno = ENOLCK;
  return -1;
}

namespace sft_test {
namespace {

using amx_sft_moe::BoundedFile;

const std::string kStep = R"({"format":"amx_sft_moe.step/1","index":)";

TEST(WithoutLocks, WhatLooksTornStays) {
  const auto path = fresh_file("torn_without_locks");
  std::ofstream(path, std::ios::binary) << kStep;
  BoundedFile(path.string(), 1 << 24, "", "ended\n").append(kStep + "1}\n");
  EXPECT_EQ(contents(path), kStep + "\n" + kStep + "1}\n");
}

TEST(WithoutLocks, NoRecordOfAnotherThreadIsCut) {
  constexpr int kThreads = 4, kRecords = 50;
  const auto path = fresh_file("without_locks");
  const std::string record = kStep + std::string(std::size_t{1} << 19, '7') + "}\n";
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      BoundedFile file(path.string(), std::int64_t{1} << 30, "", "ended\n");
      for (int r = 0; r < kRecords; ++r) file.append(record);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::string all = contents(path);
  int found = 0;
  for (std::size_t at = 0; at < all.size();) {
    if (all[at] == '\n') {  // what another wrote just then looked like a piece
      ++at;
      continue;
    }
    ASSERT_EQ(all.compare(at, record.size(), record), 0);
    at += record.size();
    ++found;
  }
  EXPECT_EQ(found, kThreads * kRecords);
}

// The largest file that a process may make stands for a disk that is full half way.
TEST(WithoutLocks, WhatMetAFullDiskStays) {
  const auto path = fresh_file("full_without_locks");
  BoundedFile file(path.string(), 1 << 24, "", "ended\n");
  file.append(kStep + "1}\n");
  const std::string whole = contents(path);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{whole.size() + 5, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  file.append(kStep + "2}\n");
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(contents(path), whole + kStep.substr(0, 5)) << "another may have written behind it since";
  file.append(kStep + "3}\n");
  EXPECT_EQ(contents(path), whole + kStep.substr(0, 5) + "\n" + kStep + "3}\n") << "a line of its own";
}

}  // namespace
}  // namespace sft_test
