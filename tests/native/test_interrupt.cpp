// Calls that are told to stop: they throw, free what they hold, and leave no thread waiting.
#include <pthread.h>

#include <thread>

#include "../../csrc/cpu/work.h"
#include "plain.h"
#include "tests.h"

// The linker sends every lock of a mutex here (see CMakeLists.txt), where a thread can be held up: see waking().
extern "C" {
int __real_pthread_mutex_lock(pthread_mutex_t*);
int __wrap_pthread_mutex_lock(pthread_mutex_t*);
}
namespace {
thread_local int locks_to_go = 0;  // at 0 this thread is held up; unless it was 0 before
void (*hold_up)() = nullptr;
}  // namespace
int __wrap_pthread_mutex_lock(pthread_mutex_t* mutex) {
  if (locks_to_go > 0 && --locks_to_go == 0) hold_up();
  return __real_pthread_mutex_lock(mutex);
}

namespace test {
namespace {

using namespace std::chrono_literals;

std::atomic<int> asked{0};
std::thread::id caller;
bool yes() {
  CHECK(std::this_thread::get_id() == caller, "asked on another thread");
  ++asked;
  return true;
}
bool no() {
  ++asked;
  return false;
}

template <class Call> void check_interrupted(const char* what, const Call& call) {
  for (int threads : {1, 2, 3, 7}) {
    asked = 0, caller = std::this_thread::get_id(), interrupted = yes;
    bool thrown = false;
    try {
      call(threads);
    } catch (const Interrupted&) {
      thrown = true;
    }
    interrupted = nullptr;
    CHECK(thrown && asked == 1, "%s with %d threads: asked %d times", what, threads, asked.load());
  }
}

// Models that take seconds and little memory: every client's tensors are the same few elements
Cohort repeated(int64_t clients, int64_t tensors, int64_t numel) {
  Cohort c(1, {{F32, numel}}, small, 0);
  c.clients = clients;
  c.numel.assign(tensors, numel), c.dtype.assign(tensors, F32), c.layer.assign(tensors, 0), c.row.assign(tensors, 0);
  c.center.assign(tensors, c.center[0]), c.client.assign(tensors * clients, c.client[0]);
  return c;
}

void every_kernel() {
  const Cohort few(9, {{F32, 60000}, {F16, 777}}, uniform);
  std::vector<double> before(100), after(100);
  gram(few.table(), {few.layer.data(), 2, false, before.data()}, 2);

  const Cohort wide = repeated(120, 3000, 2048), narrow = repeated(4, 100000, 16384), many = repeated(4000, 1500, 2048);
  std::vector<double> out(121 * 121), weights(4000, 0.5);
  const Gram of_wide{wide.layer.data(), 1, false, out.data()}, of_narrow{narrow.layer.data(), 1, false, out.data()};
  check_interrupted("gram", [&](int threads) { gram(narrow.table(), of_narrow, threads); });
  check_interrupted("dots", [&](int threads) {
    dots(narrow.table(), narrow.center.data(), narrow.row.data(), 1, 1, out.data(), threads);
  });
  check_interrupted("read_all", [&](int threads) { read_all(narrow.table(), 1 << 20, threads); });
  Outputs of_mix(many, 1), of_both(wide, 1);
  check_interrupted("mix", [&](int threads) { mix(many.table(), of_mix.mix(many, weights), threads); });
  check_interrupted("gram_mix",
                    [&](int threads) { gram_mix(wide.table(), of_wide, of_both.mix(wide, weights), threads); });

  gram(few.table(), {few.layer.data(), 2, false, after.data()}, 2);  // as if nothing had been
  CHECK(before == after, "a call after an interrupted one");
}

// Asked every 0.1 s or so, and told to go on
void told_to_go_on() {
  asked = 0, interrupted = no;
  int64_t committed = 0;
  const auto begin = std::chrono::steady_clock::now();
  for_each_in_order(
      30, 2, 1, [](int64_t, double*, int) { std::this_thread::sleep_for(20ms); },
      [&](int64_t, const double*) { ++committed; });
  interrupted = nullptr;
  CHECK(committed == 30, "%d committed", int(committed));
  CHECK(asked >= 1 && asked <= (std::chrono::steady_clock::now() - begin) / 100ms, "asked %d times", asked.load());
}

// Callers side by side, of which all are stopped
void many_callers() {
  const Cohort c = repeated(4, 100000, 16384);
  asked = 0;
  interrupted = [] { return ++asked > 0; };
  std::vector<std::thread> callers;
  std::atomic<int> stopped{0};
  for (int i = 0; i < 4; ++i)
    callers.emplace_back([&, i] {
      std::vector<double> out(25);
      try {
        gram(c.table(), {c.layer.data(), 1, false, out.data()}, 1 + i);
      } catch (const Interrupted&) {
        ++stopped;
      }
    });
  for (std::thread& t : callers) t.join();
  interrupted = nullptr;
  CHECK(stopped == 4, "%d of 4", stopped.load());
}

std::atomic<bool> held_up{false}, caller_waits{false}, answered{false};
bool yes_if_all_wait() {
  if (!caller_waits) return false;
  answered = true;
  return true;
}

}  // namespace

void interrupting() {
  every_kernel();
  told_to_go_on();
  many_callers();
}

// The one moment when a thread that waits for its slot would wait for ever if it were not woken: the item that all
// others wait for has been taken, but not begun, when the caller is told to stop; so it never will be. Of two helpers
// one is held up there, right before it locks; the other runs ahead until it has to wait; then the caller is told.
void waking() {
  hold_up = [] {
    held_up = true;
    while (!answered) std::this_thread::sleep_for(1ms);
    std::this_thread::sleep_for(100ms);  // for the caller to set `stop`, and to wake the other
  };
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> computed{0}, helpers{0};
  auto compute = [&](int64_t, double*, int) {
    thread_local bool known = false;
    ++computed;
    const bool first = !known;
    known = true;
    if (std::this_thread::get_id() != caller) {
      if (first) locks_to_go = helpers++ == 0 ? 2 : 0;  // the lock after this item, and the one before the next
      while (locks_to_go == 0 && !caller_waits) std::this_thread::sleep_for(1ms);
    } else if (first) {  // the caller's next item shall come after the one that is held up
      while (!held_up) std::this_thread::sleep_for(1ms);
    } else {
      caller_waits = true;
      for (int last = -1, quiet = 0; quiet < 200; ++quiet, std::this_thread::sleep_for(1ms))
        if (last != computed) last = computed, quiet = 0;
    }
  };
  interrupted = yes_if_all_wait;
  bool thrown = false;
  try {
    for_each_in_order(1000, 3, 1, compute, [](int64_t, const double*) {});
  } catch (const Interrupted&) {
    thrown = true;
  }
  interrupted = nullptr;
  CHECK(thrown && computed < 30, "%d items computed", computed.load());
}

}  // namespace test
