// The example's reader of safetensors files on files that are not quite right. Good ones:
// examples/mmap_safetensors.cmake.
#include <gtest/gtest.h>

#include <fstream>

#include "environment.hpp"
#include "mmap_safetensors/experts_of_layer.hpp"
#include "mmap_safetensors/safetensors.hpp"

namespace mmap_safetensors {
namespace {

std::string refusal_of(std::string_view header, std::uint64_t data_bytes) {
  try {
    parse_header(header, data_bytes);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

struct Case {
  const char* header;
  std::uint64_t data_bytes;
  const char* refusal;  // a part of the message; empty: fine
};

const Case kCases[] = {
    {R"({"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}})", 12, ""},
    {R"( { "a" : { "shape" : [ ] , "data_offsets":[ 0 , 4 ], "dtype":"F32" } } )", 4, ""},
    {R"({"__metadata__":{"\u00e9\n":"\"\\"},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})", 0, ""},
    {"{}", 0, ""},
    {R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]},)"
     R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
     2, ""},
    // Not the JSON of a header.
    {"", 0, "expected '{' at byte 0"},
    {"{", 0, "expected '\"'"},
    {R"({"a)", 0, "expected a string"},
    {R"({"a":3})", 0, "expected '{'"},
    {R"({"a\x":{}})", 0, "escaped character"},
    {R"({"\ud83d\ude00":{}})", 0, "basic plane"},
    {"{\"a\n\":{}}", 0, "control characters"},
    {"{} {}", 0, "the end of the header"},
    {R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1, "expected a number"},
    {R"({"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})", 1, "expected ']'"},
    {R"({"a":{"dtype":"U8","shape":[1,],"data_offsets":[0,1]}})", 1, "expected a number"},
    {R"({"a":{"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,1]}})", 1, "below 2^64"},
    {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":1}})", 1, "got more"},
    // Not what the data are.
    {R"({"a":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}})", 1, "dtype F4 is not known"},
    {R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1, "dtype  is not known"},
    {R"({"a":{"dtype":"U8","shape":[1]}})", 1, "data_offsets [begin, end]"},
    {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}})", 1, "data_offsets [begin, end]"},
    {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}})", 1, "data_offsets [begin, end]"},
    {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 1, "within 1 bytes of data, got 2"},
    {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4, "expected 8 bytes for its shape, got 4"},
    {R"({"a":{"dtype":"U16","shape":[9223372036854775808],"data_offsets":[0,0]}})", 0, "more than 2^64 bytes"},
    {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
     R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
     2, "it is there twice"},
    {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
     R"("b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
     3, "overlap"},
    {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
     R"("b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
     3, "hole"},
    {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 2, "data: expected 1 bytes, got 2"},
};

TEST(SafetensorsHeader, SaysWhatIsWrong) {
  for (const Case& c : kCases) {
    const std::string refusal = refusal_of(c.header, c.data_bytes);
    if (*c.refusal == '\0') {
      EXPECT_EQ(refusal, "") << c.header;
    } else {
      EXPECT_NE(refusal.find(c.refusal), std::string::npos) << c.header << "\n" << refusal;
    }
  }
}

TEST(SafetensorsHeader, ACutHeaderIsRefused) {
  const std::string header = R"({"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}})";
  for (std::size_t length = 0; length < header.size(); ++length) {
    EXPECT_NE(refusal_of(std::string_view(header).substr(0, length), 12), "") << length;
  }
}

class SafetensorsFileTest : public testing::Test {
 protected:
  SafetensorsFileTest() : path_(sft_test::fresh_file("weights.safetensors").string()) {}

  void write(std::uint64_t header_length, const std::string& rest) const {
    std::ofstream file(path_, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&header_length), sizeof(header_length));
    file << rest;
  }
  std::string refusal() const {
    try {
      SafetensorsFile{path_};
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  std::string path_;
};

TEST_F(SafetensorsFileTest, HeaderLengthBeyondTheFile) {
  for (const std::uint64_t length : {std::uint64_t{3}, std::uint64_t{1} << 40, UINT64_MAX}) {
    write(length, "{}");
    EXPECT_NE(refusal().find("expected a header within"), std::string::npos) << refusal();
  }
  write(2, "{}");
  EXPECT_EQ(refusal(), "");
  std::ofstream(path_) << "1234567";
  EXPECT_NE(refusal().find("expected at least 8 bytes"), std::string::npos) << refusal();
}

TEST_F(SafetensorsFileTest, ElementsOfAnotherTypeShapeOrAlignment) {
  const std::string header = R"({"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}})";
  write(header.size() + (7 - header.size() % 8) % 8,
        header + std::string((7 - header.size() % 8) % 8, ' ') + "12345678");
  const SafetensorsFile file(path_);
  EXPECT_THROW(file.elements<float>("b", "F32", {1, 2}), Error);
  EXPECT_THROW(file.elements<std::uint16_t>("a", "BF16", {1, 2}), Error);
  EXPECT_THROW(file.elements<float>("a", "F32", {2, 1}), Error);
  EXPECT_THROW(file.elements<float>("a", "F32", {1, 2}), Error);  // 7 bytes off
  EXPECT_EQ(*file.elements<char>("a", "F32", {1, 2}), '1');
}

// As products of the others would be beyond any number.
TEST_F(SafetensorsFileTest, NoExpertsOfEndlessSize) {
  const std::string header = R"({")" + LayerNames(0).gate_up() +
                             R"(":{"dtype":"F32","shape":[0,8589934592,8589934592],"data_offsets":[0,0]}})";
  write(header.size(), header);
  const SafetensorsFile file(path_);
  try {
    shape_of_layer(file, 0);
    ADD_FAILURE() << "taken";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("expected no dimension of 0"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace mmap_safetensors
