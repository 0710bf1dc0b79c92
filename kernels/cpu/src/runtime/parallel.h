// Thread pool that runs pieces of a kernel.
//
// The assignment of pieces to threads and the number of threads never change a result: pieces write to separate
// memory, and no sum is split over pieces.
#pragma once

#include <cstdint>

namespace quire {

using PieceFunction = void (*)(const void* context, int64_t begin, int64_t end);

// Calls body(begin, end) on half-open ranges that cover [0, count), each at most `grain` long, here and on the pool's
// threads; returns when all are done. `nanoseconds` estimates the time on one thread: if it is too short,
// the calling thread computes everything, as it does within a piece and while another thread uses the pool.
void run_pieces(int64_t count, int64_t grain, double nanoseconds, PieceFunction body, const void* context);

template <class Body>
void parallel_for(int64_t count, int64_t grain, double nanoseconds, const Body& body) {
  run_pieces(
      count, grain, nanoseconds,
      [](const void* context, int64_t begin, int64_t end) { (*static_cast<const Body*>(context))(begin, end); }, &body);
}

// Splits `count` equal items into pieces worth `piece_ns` or more, and no more than a few for each thread.
int64_t grain_for(int64_t count, double nanoseconds);

int num_threads();

// Keeps the threads awake from construction to destruction, for a caller with many short kernels in a row.
class Awake {
 public:
  explicit Awake(bool held);
  ~Awake();
  Awake(const Awake&) = delete;
  Awake& operator=(const Awake&) = delete;

 private:
  bool held_;
};

// 64-byte aligned memory of the calling thread, valid until its next call with the same `which`. Contents are not
// cleared.
void* scratch(int which, int64_t bytes);

}  // namespace quire
