// A file whose last line has no end, as of a writer that was killed inside of its write(): only a line of ours goes, and no
// record is read as the rest of whatever was there.
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "amx_sft_moe/profile/bounded_file.hpp"
#include "amx_sft_moe/profile/dump.hpp"
#include "environment.hpp"

namespace sft_test {
namespace {

using amx_sft_moe::BoundedFile;

TEST(LastLine, IsTakenAwayWhereAKillMetIt) {
  const std::string step = R"({"format":"amx_sft_moe.step/1","index":)", event = R"({"ph":"X","ts":)";
  const std::string megabyte(std::size_t{1} << 20, '7');
  struct Found {
    std::string before, record, after;
  };
  const std::vector<Found> cases = {
      Found{step + "0}\n" + step, step + "1}\n", step + "0}\n" + step + "1}\n"},
      Found{step + "0}\n{", step + "1}\n", step + "0}\n" + step + "1}\n"},
      Found{step + megabyte, step + "1}\n", "[\n" + step + "1}\n"},
      Found{"[\n" + event + "1},\n" + event + megabyte, event + "2},\n",
            "[\n" + event + "1},\n" + event + "2},\n"},
      // Not ours: nothing of it is taken, and the record has a line of its own.
      Found{"a line", step + "1}\n", "a line\n" + step + "1}\n"},
      Found{"[" + event + "1}]", event + "2},\n", "[" + event + "1}]\n" + event + "2},\n"},
      Found{step + "0}\n", step + "1}\n", step + "0}\n" + step + "1}\n"},
      // Ours and whole, but for its end: kept. Without its comma an event is none, nor is a line that ends within.
      Found{step + "0}", step + "1}\n", step + "0}\n" + step + "1}\n"},
      Found{step + R"({"a":"}\"}"}})", step + "1}\n", step + R"({"a":"}\"}"}})" + "\n" + step + "1}\n"},
      Found{step + R"({"a":"}\"}"})", step + "1}\n", "[\n" + step + "1}\n"},
      Found{step + R"({"a":"}}})", step + "1}\n", "[\n" + step + "1}\n"},
      Found{"[\n" + event + "1},", event + "2},\n", "[\n" + event + "1},\n" + event + "2},\n"},
      Found{"[\n" + event + "1}", event + "2},\n", "[\n" + event + "2},\n"},
      // Pieces whose line before ends just where a block that is read back begins.
      Found{"a\n" + step + std::string(16384 - step.size(), '7'), step + "1}\n", "a\n" + step + "1}\n"},
      Found{"a\n" + step + std::string(16385 - step.size(), '7'), step + "1}\n", "a\n" + step + "1}\n"},
      Found{"a\n" + step + std::string(16386 - step.size(), '7'), step + "1}\n", "a\n" + step + "1}\n"},
      Found{"\n", step + "1}\n", "\n" + step + "1}\n"},
  };
  for (const auto& [before, record, after] : cases) {
    const auto path = fresh_file("torn");
    std::ofstream(path, std::ios::binary) << before;
    BoundedFile(path.string(), 1 << 24, "[\n", "ended\n").append(record);
    EXPECT_TRUE(contents(path) == after) << before.substr(0, 60) << " became " << contents(path).substr(0, 200);
  }
}

// Whichever line of a pass the kill met, and whichever pass is written next.
TEST(LastLine, OfTextIsTakenAwayToo) {
  const std::string before = "[GATHER] route: 0.001 ms\n";
  const std::string forward = before + "[FWD TIMER] forward_gather: 0.001 ms (total: 0.001 ms)\n";
  const std::string backward = "[DOWN] D1_scatter: 0.001 ms\n";
  for (const char* piece :
       {"[", "[G", "[GU] lo", "[GU] lora_pass(up)", "[GU] lora_pass(up): 1.0", "[ACT] silu_backward: 0.002 ms",
        "[SUM]", "[RW", "[DOWN] D2_quantize: 0.000 ms (not needed)", "[FWD TIMER] forward_down: 0.1",
        "[BWD TIM", "[BWD TIMER] backward_down: 0.004 ms (total: 0.0", "[TIMER] ended: the file"}) {
    for (const std::string& record : {forward, backward}) {
      const auto path = fresh_file("torn_text");
      std::ofstream(path, std::ios::binary) << before << piece;
      BoundedFile(path.string(), 1 << 24, "", "ended\n", amx_sft_moe::text_lines()).append(record);
      EXPECT_EQ(contents(path), before + record) << piece;
    }
  }
  // Whole but for its end, and somebody else's.
  for (const char* kept :
       {"[BWD TIMER] backward_down: 0.004 ms (total: 0.004 ms)", "[INFO] step 3", "GU] lo"}) {
    const auto path = fresh_file("text_without_end");
    std::ofstream(path, std::ios::binary) << before << kept;
    BoundedFile(path.string(), 1 << 24, "", "ended\n", amx_sft_moe::text_lines()).append(forward);
    EXPECT_EQ(contents(path), before + kept + "\n" + forward);
  }
}

TEST(LastLine, StaysWhereItCannotBeRead) {
  const auto path = fresh_file("unreadable");
  const std::string before = R"({"ph":"X","t)", record = R"({"ph":"X","ts":1},)";
  std::ofstream(path, std::ios::binary) << before;
  std::filesystem::permissions(path, std::filesystem::perms::owner_write);
  const bool readable = std::ifstream(path).good();  // to the superuser it is
  BoundedFile(path.string(), 1 << 24, "[\n", "ended\n").append(record + "\n");
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  EXPECT_EQ(contents(path), readable ? "[\n" + record + "\n" : before + record + "\n");
}

TEST(LastLine, StaysInAFullFile) {
  const auto path = fresh_file("torn_and_full");
  const std::string before = R"({"ph":"X","t)";
  std::ofstream(path, std::ios::binary) << before;
  const auto limit = static_cast<std::int64_t>(before.size());
  BoundedFile(path.string(), limit, "[\n", "ended\n")
      .append(R"({"ph":"X","ts":1},)"
              "\n");
  EXPECT_EQ(contents(path), before);
  BoundedFile(path.string(), 2 * limit, "[\n", "ended\n")
      .append(R"({"ph":"X","ts":123456},)"
              "\n");
  EXPECT_EQ(contents(path), "[\n" + std::string(2 * before.size() - 8, ' ') + "ended\n");
}

}  // namespace
}  // namespace sft_test
