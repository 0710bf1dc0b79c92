// Calls as data: an entry point that is registered here can be recorded on a tape (tape.cpp) and replayed without
// Python.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace quire {

// Arguments as words: integers, pointers, and doubles by their bits.
using Invoke = void (*)(const int64_t* words);

template <class T>
T from_word(int64_t word) {
  if constexpr (std::is_pointer_v<T>)
    return reinterpret_cast<T>(word);
  else
    return std::bit_cast<T>(word);
}

template <class... Args>
constexpr int count_arguments(void (*)(Args...)) {
  return sizeof...(Args);
}

template <auto Function, class... Args>
void invoke(const int64_t* words, void (*)(Args...)) {
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    Function(from_word<Args>(words[I])...);
  }(std::index_sequence_for<Args...>());
}

struct Registered {
  Registered(const char* name, int arguments, Invoke invoke);
};

}  // namespace quire

#define QUIRE_RECORDABLE(name)                      \
  static const quire::Registered registered_##name( \
      #name, quire::count_arguments(quire_##name),  \
      [](const int64_t* words) { quire::invoke<quire_##name>(words, quire_##name); })
