// What a step must give for a problem, how far from it rounding may lead, and the comparison.
//
// The tolerance of a tensor is measured, not guessed: the reference runs a few times more with every named
// intermediate (and every input or result of a narrower type) moved by up to half a unit in the last place of
// the type that the kernel may keep it in. That is the error of an implementation that rounds at each tensor of
// DESIGN's section 2 and nowhere else, propagated through the very same numbers, cancellation and tiny sizes
// included. Equal values move equally, as they do when rounded: a token that visits one expert twice has one
// error, not two independent ones.
//
// A result may be kSlack times as far off as the worst of these runs, in two norms. Frobenius: for bf16 some
// 0.6 to 1 % of the tensor's norm, where one lost column of K = 128 is 9 % and a lost LoRA part tens of per
// cent. And the largest element, so that one wrong element of a large tensor cannot hide in the norm; half a
// unit in its last place is added, because few elements are that large and the runs may not have met the worst
// rounding. Where the reference is exactly zero whatever is rounded (experts without tokens, skipped routes)
// the result must be.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "problem.hpp"
#include "reference.hpp"

namespace sft_test {

// Bits of significand that a value keeps.
inline constexpr int kBitsOfBf16 = 8;
// fp32 has 24, but its sums, in an order of the kernel's own, lose some: 18 stand for sums of up to a thousand
// terms and allow some 5e-6. A bf16 rounding where there should be none is three orders outside.
inline constexpr int kBitsOfFp32Sums = 18;
inline constexpr double kSlack = 2.0;

struct Expected {
  reference::Results values;
  std::array<double, reference::kTensors> frobenius{};  // allowed error, Frobenius norm
  std::array<double, reference::kTensors> largest{};    // allowed error, any element
  std::array<std::vector<bool>, reference::kTensors> must_be_zero;
};

// `runs` of the reference with moved roundings; 0: as many as the problem needs.
Expected expected_step(const Problem& problem, unsigned runs = 0);

// Checks the result of one tensor.
void expect_close(const Expected& expected, reference::Tensor which, const Tensor& got);

// Checks all, and that nothing was written beside them.
void expect_close(const Expected& expected, const Outputs& got);

// For problems of small integers, where rounding has no say: checks that every value is the reference's, rounded once.
void expect_exact(const Problem& problem, const Outputs& got);

// Checks that two runs gave the same bits.
void expect_same_bits(const Outputs& wanted, const Outputs& got);

}  // namespace sft_test
