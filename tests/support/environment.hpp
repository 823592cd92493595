// Environment variables and files of one test.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

namespace sft_test {

// Sets an environment variable for one test, or removes it; what it was before comes back.
class Variable {
 public:
  Variable(const char* name, const std::optional<std::string>& value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    set(value);
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  ~Variable() { set(before_); }

 private:
  void set(const std::optional<std::string>& value) const {
    value ? ::setenv(name_, value->c_str(), 1) : ::unsetenv(name_);
  }

  const char* name_;
  std::optional<std::string> before_;
};

// A folder of this process alone, removed at its end: two runs side by side do not meet, and nobody's files are
// in the way.
class ProcessFolder {
 public:
  ProcessFolder() {
    std::string name = testing::TempDir() + "amx_sft_moe.XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) throw std::system_error(errno, std::generic_category(), name);
    path_ = name;
  }
  ProcessFolder(const ProcessFolder&) = delete;
  ProcessFolder& operator=(const ProcessFolder&) = delete;
  ~ProcessFolder() {
    std::error_code ignored;
    if (::getpid() == owner_) std::filesystem::remove_all(path_, ignored);  // not at the end of a forked one
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  pid_t owner_ = ::getpid();
  std::filesystem::path path_;
};

// A name under which there is no file yet.
inline std::filesystem::path fresh_file(const std::string& name) {
  static const ProcessFolder folder;
  auto path = folder.path() / name;
  std::filesystem::remove(path);  // a test may be repeated
  return path;
}

inline std::string contents(const std::filesystem::path& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

inline std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

inline std::size_t lines_with(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (const std::string& line : lines_of(text)) found += line.find(part) != std::string::npos ? 1 : 0;
  return found;
}

}  // namespace sft_test
