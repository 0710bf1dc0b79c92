#include "parallel.h"

#include "api.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__linux__)
#include <sched.h>
#include <time.h>
#endif
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace quire {
namespace {

// Measured on two cores of a Zen 5 under KVM: a spinning thread starts 0.15 us after the call and the call returns
// 0.15 us after it is done; a sleeping one starts after 14 to 16 us.
constexpr double SPLIT_NS = 2500;   // work under this stays on its thread
constexpr double WAKE_NS = 30000;   // shorter work wakes no thread; awake threads may help
constexpr double PIECE_NS = 1500;   // pieces are worth at least this
constexpr int64_t SPIN_NS = 50000;  // an idle thread polls for work this long, then sleeps

// A thread that loses its core to another process within a piece delays all others: on two cores with two
// other busy processes, a step of 26 ms took 160. So it is excluded for a multiple of the time it made the others wait,
// unless they worked for longer than they waited: in long kernels its help outweighs the wait.
constexpr int64_t LOST_NS = 100000;  // shorter waits may be interrupts
constexpr int64_t BENCH_FACTOR = 8;
constexpr int64_t BENCH_MOST_NS = 100000000;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until ready() or `limit_ns` has passed; returns ready().
template <class Ready>
bool spin_until(const Ready& ready, int64_t limit_ns) {
  const int64_t start = now_ns();
  for (;;) {
    for (int i = 0; i < 16; i++) {
      if (ready()) return true;
      pause();
    }
    if (now_ns() - start > limit_ns) return false;
  }
}

#if defined(__linux__)
int this_cpu() { return sched_getcpu(); }

// Keeps the calling thread off `cpu`, if it may run elsewhere. Schedulers of busy machines tend to wake a thread
// on the core of the waking one, where the two can only alternate.
void stay_off(int cpu, const cpu_set_t& allowed) {
  cpu_set_t others = allowed;
  CPU_CLR(cpu, &others);
  if (CPU_COUNT(&others) > 0) sched_setaffinity(0, sizeof(others), &others);
}
#else
int this_cpu() { return -1; }
#endif

struct Job {
  int64_t count, grain;
  PieceFunction body;
  const void* context;
  int cpu = -1;  // core of the caller
};

// A thread of the pool.
struct Worker {
  std::thread thread;
  std::atomic<bool> inside{false};         // it has joined the job
  std::atomic<int64_t> benched_until{0};  // it joins none before
  int64_t cpu_ns = 0;                      // CPU time used when the caller started to wait for it

  // Its total CPU time, or -1 if unknown.
  int64_t used_ns() {
#if defined(__linux__)
    clockid_t clock;
    timespec used;
    if (pthread_getcpuclockid(thread.native_handle(), &clock) == 0 && clock_gettime(clock, &used) == 0)
      return used.tv_sec * 1000000000 + used.tv_nsec;
#endif
    return -1;
  }
};

// One job at a time. `gate_` holds its number (high word), whether it still takes helpers (OPEN) and how many it has.
// A thread that wakes late finds the gate closed, and the caller does not wait for it.
class Pool {
 public:
  explicit Pool(int threads) : threads_(threads) {}

  void run(const Job& job, double nanoseconds) {
    const bool sleepers =
        asleep_.load(std::memory_order_relaxed) + benched_.load(std::memory_order_relaxed) + 1 >= threads_;
    if (threads_ == 1 || job.count <= job.grain || nanoseconds < SPLIT_NS ||
        (sleepers && started_ && nanoseconds < WAKE_NS))
      return job.body(job.context, 0, job.count);
    if (inside_ || busy_.test_and_set(std::memory_order_acquire)) return job.body(job.context, 0, job.count);
    start();
    const int64_t begin = now_ns();
    job_ = job;
    job_.cpu = this_cpu();
    next_.store(0, std::memory_order_relaxed);
    const uint64_t number = (gate_.load(std::memory_order_relaxed) >> 32) + 1;
    gate_.store(number << 32 | OPEN, std::memory_order_seq_cst);
    wake();
    take_pieces();
    gate_.fetch_and(~OPEN, std::memory_order_seq_cst);
    await_helpers(begin);
    busy_.clear(std::memory_order_release);
  }

  void hold(bool on) {
    held_.fetch_add(on ? 1 : -1, std::memory_order_seq_cst);
    if (on && threads_ > 1) {
      if (!busy_.test_and_set(std::memory_order_acquire)) {
        start();
        busy_.clear(std::memory_order_release);
      }
      wake();
    }
  }

  // Waits for a running job, so call it between kernels.
  void stop() {
    while (busy_.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
    stopping_.store(true, std::memory_order_seq_cst);
    wake_word_.fetch_add(1, std::memory_order_seq_cst);
    wake_word_.notify_all();
    for (auto& worker : workers_) worker->thread.join();
  }

  int threads() const { return threads_; }

 private:
  static constexpr uint64_t OPEN = 1ull << 31;
  static constexpr uint64_t HELPERS = OPEN - 1;

  void start() {
    if (started_) return;
    started_ = true;
#if defined(__linux__)
    sched_getaffinity(0, sizeof(allowed_), &allowed_);
#endif
    for (int i = 1; i < threads_; i++) {
      Worker& worker = *workers_.emplace_back(std::make_unique<Worker>());
      worker.thread = std::thread([this, &worker] { work(worker); });
    }
  }

  void wake() {
    if (asleep_.load(std::memory_order_seq_cst) == 0) return;
    wake_word_.fetch_add(1, std::memory_order_seq_cst);
    wake_word_.notify_all();
  }

  void take_pieces() {
    inside_ = true;
    const Job job = job_;
    for (;;) {
      const int64_t begin = next_.fetch_add(job.grain, std::memory_order_relaxed);
      if (begin >= job.count) break;
      job.body(job.context, begin, std::min(begin + job.grain, job.count));
    }
    inside_ = false;
  }

  void await_helpers(int64_t begin) {
    const auto alone = [this] { return (gate_.load(std::memory_order_seq_cst) & HELPERS) == 0; };
    if (spin_until(alone, SPIN_NS)) return;
    const int64_t since = now_ns();
    for (auto& worker : workers_) worker->cpu_ns = worker->inside.load(std::memory_order_acquire) ? worker->used_ns() : -1;
    sleep_until(alone);
    const int64_t end = now_ns();
    if (end - since < std::max(LOST_NS, since - begin)) return;
    for (auto& worker : workers_) {
      if (worker->cpu_ns < 0) continue;
      const int64_t lost = end - since - (worker->used_ns() - worker->cpu_ns);
      if (lost > LOST_NS) worker->benched_until.store(end + std::min(BENCH_FACTOR * lost, BENCH_MOST_NS));
    }
  }

  // A helper may have lost its core: leave this core to it.
  template <class Ready>
  void sleep_until(const Ready& alone) {
    const uint32_t done = done_word_.load(std::memory_order_seq_cst);
    awaiting_.store(true, std::memory_order_seq_cst);
    if (!alone()) done_word_.wait(done, std::memory_order_seq_cst);
    awaiting_.store(false, std::memory_order_seq_cst);
    while (!alone()) std::this_thread::yield();
  }

  void leave(Worker& worker) {
    worker.inside.store(false, std::memory_order_release);
    const uint64_t before = gate_.fetch_sub(1, std::memory_order_seq_cst);
    if ((before & HELPERS) == 1 && awaiting_.load(std::memory_order_seq_cst)) {
      done_word_.fetch_add(1, std::memory_order_seq_cst);
      done_word_.notify_all();
    }
  }

  // Stays out of the pool while the caller has excluded it.
  void wait_while_excluded(Worker& worker) {
    const int64_t left = worker.benched_until.load(std::memory_order_relaxed) - now_ns();
    if (left <= 0) return;
    benched_.fetch_add(1, std::memory_order_seq_cst);
    std::this_thread::sleep_for(std::chrono::nanoseconds(left));
    benched_.fetch_sub(1, std::memory_order_seq_cst);
  }

  void work(Worker& worker) {
    uint64_t last = 0;  // number of the last job this thread joined: one visit is enough
    const auto wanted = [&] {
      const uint64_t gate = gate_.load(std::memory_order_seq_cst);
      return ((gate & OPEN) && gate >> 32 != last) || stopping_.load(std::memory_order_relaxed);
    };
    for (;;) {
      wait_while_excluded(worker);
      if (!spin_until(wanted, SPIN_NS)) {
        if (held_.load(std::memory_order_relaxed) > 0) continue;
        const uint32_t word = wake_word_.load(std::memory_order_seq_cst);
        asleep_.fetch_add(1, std::memory_order_seq_cst);
        if (!wanted()) wake_word_.wait(word, std::memory_order_seq_cst);
        asleep_.fetch_sub(1, std::memory_order_seq_cst);
        continue;
      }
      if (stopping_.load(std::memory_order_seq_cst)) return;
      uint64_t gate = gate_.load(std::memory_order_acquire);
      if (!(gate & OPEN) || !gate_.compare_exchange_strong(gate, gate + 1, std::memory_order_acq_rel)) continue;
      last = gate >> 32;
      worker.inside.store(true, std::memory_order_release);
#if defined(__linux__)
      if (this_cpu() == job_.cpu) stay_off(job_.cpu, allowed_);
#endif
      take_pieces();
      leave(worker);
    }
  }

  static thread_local bool inside_;
  const int threads_;
  bool started_ = false;
  std::vector<std::unique_ptr<Worker>> workers_;
#if defined(__linux__)
  cpu_set_t allowed_;
#endif
  Job job_{};
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  alignas(64) std::atomic<uint64_t> gate_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint32_t> wake_word_{0};
  std::atomic<uint32_t> done_word_{0};
  std::atomic<int> asleep_{0};
  std::atomic<int> benched_{0};
  std::atomic<int> held_{0};
  std::atomic<bool> awaiting_{false};
  std::atomic<bool> stopping_{false};
};

thread_local bool Pool::inside_ = false;

int default_threads() { return std::max(1u, std::thread::hardware_concurrency()); }

// Never destroyed: threads may still access it when the process exits.
std::atomic<Pool*> pool{new Pool(default_threads())};

// A child of fork() has the pool but none of its threads: it gets a new one.
#if defined(__unix__) || defined(__APPLE__)
const int at_fork = pthread_atfork(nullptr, nullptr, [] { pool.store(new Pool(pool.load()->threads())); });
#endif

}  // namespace

void run_pieces(int64_t count, int64_t grain, double nanoseconds, PieceFunction body, const void* context) {
  if (count > 0) pool.load(std::memory_order_acquire)->run({count, grain, body, context}, nanoseconds);
}

int num_threads() { return pool.load(std::memory_order_acquire)->threads(); }

int64_t grain_for(int64_t count, double nanoseconds) {
  const double pieces = std::min(nanoseconds / PIECE_NS, 8.0 * num_threads());
  return std::max<int64_t>(1, pieces > 1 ? static_cast<int64_t>(count / pieces) : count);
}

Awake::Awake(bool held) : held_(held) {
  if (held_) pool.load(std::memory_order_acquire)->hold(true);
}
Awake::~Awake() {
  if (held_) pool.load(std::memory_order_acquire)->hold(false);
}

void* scratch(int which, int64_t bytes) {
  struct Buffer {
    void* memory = nullptr;
    int64_t bytes = 0;
    ~Buffer() { std::free(memory); }
  };
  static thread_local Buffer buffers[8];
  Buffer& buffer = buffers[which];
  if (buffer.bytes < bytes) {
    std::free(buffer.memory);
    buffer.bytes = (bytes + bytes / 2 + 4095) / 4096 * 4096;
    buffer.memory = std::aligned_alloc(64, buffer.bytes);
  }
  return buffer.memory;
}

}  // namespace quire

// Between kernels only.
QUIRE_API void quire_set_num_threads(int64_t threads) {
  using namespace quire;
  Pool* old = pool.load();
  if (old->threads() == threads) return;
  pool.store(new Pool(static_cast<int>(std::max<int64_t>(1, threads))));
  old->stop();
  delete old;
}

QUIRE_API int64_t quire_num_threads() { return quire::num_threads(); }
