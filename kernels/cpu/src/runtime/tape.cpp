#include "tape.h"

#include <chrono>
#include <cstring>
#include <vector>

#include "api.h"
#include "parallel.h"

namespace quire {
namespace {

constexpr int MAX_ARGUMENTS = 24;
constexpr double LONG_NS = 600000;

struct Operation {
  const char* name;
  int arguments;
  Invoke invoke;
};

std::vector<Operation>& operations() {
  static std::vector<Operation> all;
  return all;
}

// One call. words[i] is a value, or, where sizes[i] >= 0, the size of that number at replay.
struct Entry {
  Invoke invoke;
  int arguments;
  int64_t words[MAX_ARGUMENTS];
  int8_t sizes[MAX_ARGUMENTS];
};

struct Tape {
  std::vector<Entry> entries;
  double nanoseconds = 0;  // duration of the last replay
  bool held = false;       // threads are kept awake
};

}  // namespace

Registered::Registered(const char* name, int arguments, Invoke invoke) {
  operations().push_back({name, arguments, invoke});
}

}  // namespace quire

using namespace quire;

QUIRE_API void* quire_tape_new() { return new Tape; }
QUIRE_API void quire_tape_free(void* tape) { delete static_cast<Tape*>(tape); }

// Appends a call. Returns 0, or -1 if no entry point of that name has this number of arguments.
QUIRE_API int64_t quire_tape_add(void* tape, const char* name, int64_t arguments, const int64_t* words,
                                 const int8_t* sizes) {
  for (const Operation& operation : operations()) {
    if (std::strcmp(operation.name, name) != 0) continue;
    if (operation.arguments != arguments || arguments > MAX_ARGUMENTS) return -1;
    Entry entry{operation.invoke, operation.arguments, {}, {}};
    std::memcpy(entry.words, words, arguments * sizeof(int64_t));
    std::memcpy(entry.sizes, sizes, arguments);
    static_cast<Tape*>(tape)->entries.push_back(entry);
    return 0;
  }
  return -1;
}

QUIRE_API void quire_tape_replay(void* handle, const int64_t* sizes) {
  Tape& tape = *static_cast<Tape*>(handle);
  const auto start = std::chrono::steady_clock::now();
  {
    // Estimated by the last duration. Threads kept awake through a short replay would take cores from
    // the thread that waits for the result, and gain little.
    tape.held = tape.nanoseconds >= (tape.held ? LONG_NS / 2 : LONG_NS);
    const Awake awake(tape.held);
    for (const Entry& entry : tape.entries) {
      int64_t words[MAX_ARGUMENTS];
      for (int i = 0; i < entry.arguments; i++) words[i] = entry.sizes[i] >= 0 ? sizes[entry.sizes[i]] : entry.words[i];
      entry.invoke(words);
    }
  }
  tape.nanoseconds = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
}
