// How work is cut and how partial sums meet again. Both depend on the tensors alone, never on the thread count.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "../fastagg.h"
#include "pool.h"
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace fastagg {

constexpr int64_t chunk_elements = 16384;

struct Chunk {
  int64_t tensor, begin, count;
};

// The tensors of `order`, cut into chunks of at most `elements`; numbered, but not stored one by one.
class Chunks {
 public:
  Chunks(const Table& table, std::vector<int64_t> order, int64_t elements = chunk_elements)
      : table_(table), order_(std::move(order)), first_{0}, elements_(elements) {
    for (int64_t t : order_) first_.push_back(first_.back() + (table.numel[t] + elements - 1) / elements);
  }
  int64_t size() const { return first_.back(); }
  Chunk operator[](int64_t i) const {
    size_t at = std::upper_bound(first_.begin(), first_.end(), i) - first_.begin() - 1;
    int64_t tensor = order_[at], begin = (i - first_[at]) * elements_;
    return {tensor, begin, std::min(elements_, table_.numel[tensor] - begin)};
  }

 private:
  const Table& table_;
  std::vector<int64_t> order_, first_;
  int64_t elements_;
};

// The caller may have set flush-to-zero on its own thread only (torch.set_flush_denormal): kernels always run with
// the default floating-point environment, or bits would depend on which thread did what.
class DefaultFloatEnvironment {
#if defined(__SSE2__)
  unsigned saved_ = _mm_getcsr();

 public:
  DefaultFloatEnvironment() { _mm_setcsr(0x1f80); }
  ~DefaultFloatEnvironment() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  uint64_t saved_;

 public:
  DefaultFloatEnvironment() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    set(0);
  }
  ~DefaultFloatEnvironment() { set(saved_); }

 private:
  static void set(uint64_t value) { __asm__ volatile("msr fpcr, %0" : : "r"(value) : "memory"); }
#else
 public:
  DefaultFloatEnvironment() {}
  ~DefaultFloatEnvironment() {}
#endif
};

// Whether a call was told to stop. The thread that called asks `interrupted`, between two items.
class Stop {
 public:
  explicit operator bool() const { return stop_.load(std::memory_order_relaxed); }
  bool asked() {  // true the first time the answer is yes
    if (!interrupted || std::this_thread::get_id() != caller_) return false;
    const auto now = std::chrono::steady_clock::now();
    if (now - last_ < std::chrono::milliseconds(100)) return false;
    last_ = now;
    if (interrupted()) stop_ = true;
    return stop_;
  }

 private:
  std::atomic<bool> stop_{false};
  std::thread::id caller_ = std::this_thread::get_id();
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

// work(item, worker) for item in [0, items), on several threads; worker numbers the threads from 0. wake() is called
// once `stop` is set, for those that wait for others.
template <class Work, class Wake>
void for_each_item(int64_t items, int threads, const Work& work, Stop& stop, const Wake& wake) {
  std::atomic<int64_t> next{0};
  std::atomic<int> workers{0};
  threads = int(std::max<int64_t>(1, std::min<int64_t>(threads, items)));
  parallel(threads, [&] {
    DefaultFloatEnvironment environment;
    int worker = workers++;
    for (int64_t i; !stop && (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) {
      work(i, worker);
      if (stop.asked()) wake();
    }
  });
  if (stop) throw Interrupted();
}

template <class Work> void for_each_item(int64_t items, int threads, const Work& work) {
  Stop stop;
  for_each_item(items, threads, work, stop, [] {});
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};
template <class T> using Buffer = std::unique_ptr<T[], Free>;
template <class T> Buffer<T> aligned_buffer(size_t count) {
  void* p = std::aligned_alloc(64, (count * sizeof(T) + 127) / 64 * 64);
  if (!p) throw std::bad_alloc();
  return Buffer<T>(static_cast<T*>(p));
}

// compute(item, slot, worker) runs in parallel and fills a zeroed slot; commit(item, slot) runs in item order, one at
// a time. Memory is a ring of slots, so it does not grow with the number of items.
template <class Compute, class Commit>
void for_each_in_order(int64_t items, int threads, size_t slot_size, const Compute& compute, const Commit& commit) {
  if (items == 0) return;
  constexpr size_t ring_bytes = 32u << 20;
  int64_t affordable = std::max<int64_t>(1, ring_bytes / (slot_size * sizeof(double)));
  int64_t ring = std::min<int64_t>({items, 4 * int64_t(threads), affordable});
  threads = int(std::min<int64_t>(threads, ring));
  Buffer<double> slots = aligned_buffer<double>(size_t(ring) * slot_size);
  std::vector<int64_t> holds(ring, -1);  // the finished item that waits in each slot
  std::mutex mutex;
  std::condition_variable moved;
  int64_t committed = 0;
  Stop stop;
  auto one = [&](int64_t item, int worker) {
    double* slot = slots.get() + size_t(item % ring) * slot_size;
    {
      std::unique_lock<std::mutex> lock(mutex);
      moved.wait(lock, [&] { return item - committed < ring || stop; });
      if (stop) return;
    }
    std::memset(slot, 0, slot_size * sizeof(double));
    compute(item, slot, worker);
    std::lock_guard<std::mutex> lock(mutex);
    holds[item % ring] = item;
    if (item != committed) return;
    for (; committed < items && holds[committed % ring] == committed; ++committed)
      commit(committed, slots.get() + size_t(committed % ring) * slot_size);
    moved.notify_all();
  };
  for_each_item(items, threads, one, stop, [&] {
    std::lock_guard<std::mutex> lock(mutex);
    moved.notify_all();
  });
}

}  // namespace fastagg
