// Work in phases over a pool of threads that belongs to somebody else (XLA's), without ever waiting for a task that has not begun.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>

namespace dsjax {

constexpr long kLeastWork = 1 << 19;  // multiply-adds below which another thread is not worth waking

// Runs a task on another thread, at some time, perhaps only after the call that asked for it is over.
typedef std::function<void(std::function<void()>)> Schedule;

// `body(phase, item, worker)` for every item of every phase, a phase beginning when all items of the one before are done.
// Workers, at most `threads`, are this thread and whichever of the pool's come in time. `worker` numbers them from 0.
class Phases {
 public:
  typedef std::function<long(int phase)> Count;
  typedef std::function<void(int phase, long item, int worker)> Body;

  static void run(int phases, const Count& count, const Body& body, int threads, const Schedule& schedule) {
    if (threads <= 1) {
      for (int phase = 0; phase < phases; phase++)
        for (long item = 0, items = count(phase); item < items; item++) body(phase, item, 0);
      return;
    }
    auto shared = std::make_shared<Phases>(phases, count, body, threads);
    for (int helper = 1; helper < threads; helper++) schedule([shared] { shared->help(); });
    shared->work(0);
    // No more may come in; those inside finish the item they have and find nothing more.
    shared->inside_.fetch_or(kClosed);
    while (shared->inside_.load(std::memory_order_acquire) != kClosed) std::this_thread::yield();
  }

  Phases(int phases, const Count& count, const Body& body, int threads)
      : phases_(phases), count_(count), body_(body), progress_(new Progress[phases]), threads_(threads) {}

 private:
  struct Progress {
    std::atomic<long> next{0}, done{0};
  };
  static constexpr int kClosed = 1 << 30;

  void help() {
    // `count_` and `body_` live on the caller's stack: they may be touched only between coming in and leaving.
    if (!(inside_.fetch_add(1, std::memory_order_acq_rel) & kClosed)) {
      int worker = workers_.fetch_add(1);
      if (worker < threads_) work(worker);
    }
    inside_.fetch_sub(1, std::memory_order_release);
  }

  void work(int worker) {
    for (int phase = 0; phase < phases_; phase++) {
      Progress& progress = progress_[phase];
      const long items = count_(phase);
      for (long item; (item = progress.next.fetch_add(1, std::memory_order_relaxed)) < items;) {
        body_(phase, item, worker);
        progress.done.fetch_add(1, std::memory_order_acq_rel);
      }
      for (int turn = 0; progress.done.load(std::memory_order_acquire) < items; turn++)
        if (turn > 256) std::this_thread::yield();
    }
  }

  const int phases_;
  const Count& count_;
  const Body& body_;
  std::unique_ptr<Progress[]> progress_;
  const int threads_;
  std::atomic<int> inside_{0}, workers_{1};
};

// Allocates from working memory in whole cache lines. Without memory, it only counts the bytes.
class Scratch {
 public:
  explicit Scratch(char* memory) : memory_(memory) {}
  template <class T>
  T* take(long count) {
    T* found = memory_ ? reinterpret_cast<T*>(memory_ + bytes_) : nullptr;
    bytes_ += (sizeof(T) * count + 63) / 64 * 64;
    return found;
  }
  size_t bytes() const { return bytes_; }

 private:
  char* memory_;
  size_t bytes_ = 0;
};

// Runs a kernel. Each kernel is compiled once, in the unit that instantiates this for it (`extern template` elsewhere).
template <class Kernel>
void run_kernel(const Kernel& kernel, char* scratch, const Schedule& schedule) {
  kernel.run(scratch, schedule);
}

}  // namespace dsjax
