// Our own small pool, not OpenMP: torch bundles a libgomp of its own, two of them fight over the cores,
// and libgomp hangs in a child that forks after use.
#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

namespace fastagg {
namespace {

struct Job {
  const std::function<void()>* work;
  int wanted;       // helpers that may still join
  int running = 0;  // helpers inside work()
  std::condition_variable done{};
};

struct Pool {
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<Job*> jobs;
  int helpers = 0;

  void help() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      wake.wait(lock, [&] { return !jobs.empty(); });
      Job* job = jobs.front();
      if (--job->wanted == 0) jobs.pop_front();
      ++job->running;
      lock.unlock();
      (*job->work)();
      lock.lock();
      if (--job->running == 0) job->done.notify_one();
    }
  }

  // Signals are for the interpreter's threads: a helper starts with all blocked but those that its own faults raise.
  void start_helpers(int wanted) {
    sigset_t all, old;
    sigfillset(&all);
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    try {
      for (; helpers < wanted; ++helpers) std::thread([this] { help(); }).detach();
    } catch (...) {  // the system gives no more threads: fewer helpers do the same work
    }
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
  }
};

Pool* pool = nullptr;  // never deleted: helpers may outlive static destruction

}  // namespace

void parallel(int threads, const std::function<void()>& work) {
  if (threads <= 1) return work();
  static std::once_flag once;
  std::call_once(once, [] {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
  });
  Job job{&work, threads - 1};
  {
    std::lock_guard<std::mutex> lock(pool->mutex);
    pool->start_helpers(std::min(threads - 1, 1023));
    pool->jobs.push_back(&job);
  }
  for (int i = 1; i < threads; ++i) pool->wake.notify_one();
  work();
  std::unique_lock<std::mutex> lock(pool->mutex);
  auto at = std::find(pool->jobs.begin(), pool->jobs.end(), &job);
  if (at != pool->jobs.end()) pool->jobs.erase(at);
  job.done.wait(lock, [&] { return job.running == 0; });
}

}  // namespace fastagg
