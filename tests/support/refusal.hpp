// Checks that a call is refused as the contract says: with this exception, whose message names the argument and
// holds what was expected and what came.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

namespace sft_test {

// How a misuse shows in a message: the argument, and both values.
struct Complaint {
  std::string argument;
  std::string expected;
  std::string got;
};

template <class Error, class Call>
void expect_refused(Call&& call, const Complaint& complaint) {
  try {
    call();
  } catch (const Error& error) {
    const std::string message = error.what();
    for (const std::string& part : {complaint.argument, complaint.expected, complaint.got}) {
      EXPECT_NE(message.find(part), std::string::npos) << "\"" << part << "\" is missing in: " << message;
    }
    return;
  } catch (const std::exception& error) {
    ADD_FAILURE() << complaint.argument << ": another exception than wanted: " << error.what();
    return;
  }
  ADD_FAILURE() << complaint.argument << ": was accepted";
}

}  // namespace sft_test
