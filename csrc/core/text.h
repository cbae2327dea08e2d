// Builds messages from parts. Called wherever csrc throws.
#pragma once

#include <cstddef>
#include <string>
#include <type_traits>

namespace speedtorch {

// Concatenates texts and integers.
template <typename... Parts>
std::string text(const Parts&... parts) {
  auto part = [](const auto& one) -> std::string {
    if constexpr (std::is_integral_v<std::remove_cvref_t<decltype(one)>>) {
      return std::to_string(one);
    } else {
      return one;
    }
  };
  return (std::string() + ... + part(parts));
}

// The name of a list entry in messages.
inline std::string item(const char* list, size_t k) { return text(list, "[", k, "]"); }

}  // namespace speedtorch
