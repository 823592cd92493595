#include "compare.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>

namespace sft_test {

namespace {

// Moves each value by a random part of half a unit in its last place. How many bits there are depends on the
// place; 0 stands for an exact value.
class Rounding {
 public:
  Rounding(const Problem& problem, std::uint64_t seed) : seed_(seed) {
    const DType kernel = problem.weight_dtype();
    const auto bits = [](DType dtype) { return dtype == DType::kBf16 ? kBitsOfBf16 : kBitsOfFp32Sums; };
    // An input wider than the kernel computes in is rounded on its way in.
    const auto input = [&](DType dtype) {
      return kernel == DType::kBf16 && dtype == DType::kFp32 ? kBitsOfBf16 : 0;
    };
    const Storage& s = problem.storage();
    using reference::Site;
    at(Site::kX) = at(Site::kGradY) = input(s.activations);
    at(Site::kFactor) = input(s.factors);
    at(Site::kInterior) = at(Site::kRow) = bits(kernel);
    at(Site::kY) = at(Site::kGradX) = bits(s.activations);
    at(Site::kGradW) = bits(s.routing);
    at(Site::kGradFactor) = bits(s.factors);
  }

  double operator()(reference::Site site, double value) {
    return value + 2 * half_ulp(site, value) * random_of(value);
  }

  double half_ulp(reference::Site site, double value) {
    if (at(site) == 0 || value == 0) return 0;
    return std::ldexp(1.0, std::ilogb(value) - at(site));
  }

 private:
  int& at(reference::Site site) { return bits_[static_cast<std::size_t>(site)]; }

  // In [-1/2, 1/2), a function of the value and the seed (the finalizer of SplitMix64).
  double random_of(double value) const {
    std::uint64_t z = std::bit_cast<std::uint64_t>(value) + seed_ * 0x9e3779b97f4a7c15U;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53 - 0.5;
  }

  std::array<int, 9> bits_{};
  std::uint64_t seed_;
};

constexpr std::array<reference::Site, reference::kTensors> kSiteOf = {
    reference::Site::kY,          reference::Site::kGradX,      reference::Site::kGradW,
    reference::Site::kGradFactor, reference::Site::kGradFactor, reference::Site::kGradFactor,
    reference::Site::kGradFactor, reference::Site::kGradFactor, reference::Site::kGradFactor,
    reference::Site::kGradFactor, reference::Site::kGradFactor, reference::Site::kGradFactor,
    reference::Site::kGradFactor, reference::Site::kGradFactor, reference::Site::kGradFactor};

struct Error {
  double frobenius = 0;
  double largest = 0;
};

Error error_of(const std::vector<double>& wanted, const std::vector<double>& got) {
  Error error;
  double squares = 0;
  for (std::size_t n = 0; n < wanted.size(); ++n) {
    const double off = std::abs(got[n] - wanted[n]);
    squares += off * off;
    // Nothing is above a NaN: once there it stays.
    if (std::isnan(off) || off > error.largest) error.largest = off;
  }
  error.frobenius = std::sqrt(squares);
  return error;
}

void expect_exact_zeros(const std::vector<bool>& must_be_zero, const std::vector<double>& got,
                        const std::string& name) {
  for (std::size_t n = 0; n < got.size(); ++n) {
    if (!must_be_zero[n] || got[n] == 0) continue;
    ADD_FAILURE() << name << "[" << n << "] must be exactly 0, is " << got[n];
    return;
  }
}

// Few elements are few samples of the rounding, and so are the few values that rounding moves across a clamp:
// such problems need (and being small can afford) more runs to find how far it goes.
unsigned runs_for(const Problem& problem) {
  const reference::Layer& layer = problem.layer();
  const auto routes = static_cast<double>(problem.batch().ids.size());
  return routes * layer.hidden * layer.intermediate < 2e5 || layer.glu.form == reference::Glu::kClamped ? 25
                                                                                                        : 6;
}

}  // namespace

Expected expected_step(const Problem& problem, unsigned runs) {
  Expected out;
  out.values = reference::step(problem.layer(), problem.batch());
  for (std::size_t t = 0; t < reference::kTensors; ++t) {
    for (double value : out.values[t]) out.must_be_zero[t].push_back(value == 0);
  }
  if (runs == 0) runs = runs_for(problem);
  for (unsigned run = 0; run < runs; ++run) {
    Rounding rounding(problem, 1000 + run);
    const reference::Results moved = reference::step(problem.layer(), problem.batch(), rounding);
    for (std::size_t t = 0; t < reference::kTensors; ++t) {
      for (std::size_t n = 0; n < moved[t].size(); ++n) {
        if (moved[t][n] != 0) out.must_be_zero[t][n] = false;
      }
      const Error error = error_of(out.values[t], moved[t]);
      out.frobenius[t] = std::max(out.frobenius[t], kSlack * error.frobenius);
      out.largest[t] = std::max(out.largest[t], kSlack * error.largest);
    }
  }
  for (std::size_t t = 0; t < reference::kTensors; ++t) {
    double largest = 0;
    for (double value : out.values[t]) largest = std::max(largest, std::abs(value));
    out.largest[t] += Rounding(problem, 0).half_ulp(kSiteOf[t], largest * 1.01);
  }
  return out;
}

void expect_close(const Expected& expected, reference::Tensor which, const Tensor& got) {
  const std::string name = reference::kTensorNames[which];
  const std::vector<double>& wanted = expected.values[which];
  const std::vector<double> values = got.values();
  ASSERT_EQ(wanted.size(), values.size()) << name;
  const Error error = error_of(wanted, values);
  EXPECT_LE(error.frobenius, expected.frobenius[which]) << name << ": Frobenius norm of the error";
  EXPECT_LE(error.largest, expected.largest[which]) << name << ": largest error of an element";
  expect_exact_zeros(expected.must_be_zero[which], values, name);
}

void expect_close(const Expected& expected, const Outputs& got) {
  for (std::size_t t = 0; t < reference::kTensors; ++t) {
    const auto which = static_cast<reference::Tensor>(t);
    expect_close(expected, which, got[which]);
  }
  EXPECT_TRUE(got.gaps_are_poison()) << "something was written between the rows of a result";
}

void expect_exact(const Problem& problem, const Outputs& got) {
  const reference::Results want = reference::step(problem.layer(), problem.batch());
  for (std::size_t t = 0; t < reference::kTensors; ++t) {
    const Tensor& tensor = got[static_cast<reference::Tensor>(t)];
    const std::vector<double> values = tensor.values();
    ASSERT_EQ(values.size(), want[t].size()) << reference::kTensorNames[t];
    for (std::size_t n = 0; n < values.size(); ++n) {
      // One line per tensor says enough.
      ASSERT_EQ(values[n], rounded(tensor.dtype(), want[t][n]))
          << reference::kTensorNames[t] << "[" << n << "]";
    }
  }
}

void expect_same_bits(const Outputs& wanted, const Outputs& got) {
  for (std::size_t t = 0; t < reference::kTensors; ++t) {
    const auto which = static_cast<reference::Tensor>(t);
    EXPECT_EQ(wanted[which].bits(), got[which].bits()) << reference::kTensorNames[which] << ": bits differ";
  }
}

}  // namespace sft_test
