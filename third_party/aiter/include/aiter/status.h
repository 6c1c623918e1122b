// SPDX-License-Identifier: Apache-2.0

#ifndef AITER_STATUS_H_
#define AITER_STATUS_H_

#include <string>
#include <utility>

namespace aiter {

enum class StatusCode {
  kOk,
  kInvalidArgument,     // An argument that no device could accept.
  kUnimplemented,       // No kernel for this device or this problem.
  kFailedPrecondition,  // No driver, no current device, a plan of another call.
  kResourceExhausted,   // Out of host or device memory.
  kInternal,            // The driver refused; the message has its own words.
};

// Result of a call: ok, or a code and a message which names the argument, what
// was given and what is accepted. The library throws and aborts nowhere.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message)
      : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

}  // namespace aiter

#define AITER_RETURN_IF_ERROR(expr)                        \
  do {                                                     \
    if (::aiter::Status status_ = (expr); !status_.ok()) { \
      return status_;                                      \
    }                                                      \
  } while (false)

#endif  // AITER_STATUS_H_
