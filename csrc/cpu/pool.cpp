// Threads to work on. On Linux those that torch has already, for after a parallel operation of torch its threads keep
// their cores busy for some 5 ms waiting for the next one: helpers of our own would only get in their way, and a small
// model is aggregated in less. Elsewhere, and in a child that forked (where libgomp hangs), a small pool of our own.
#include "pool.h"

#include <pthread.h>
#include <signal.h>
#if defined(__linux__)
#include <dlfcn.h>
#include <link.h>

#include <cstring>
#endif

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
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

// libgomp's entry point for `#pragma omp parallel`: part of its ABI, as compiled code calls it
using GompParallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);

GompParallel torch_threads() {
#if defined(__linux__)
  std::string path;
  dl_iterate_phdr(
      [](dl_phdr_info* library, size_t, void* path) {
        if (!std::strstr(library->dlpi_name, "/torch/lib/libgomp")) return 0;
        *(std::string*)path = library->dlpi_name;
        return 1;
      },
      &path);
  void* library = path.empty() ? nullptr : dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (library) return (GompParallel)dlsym(library, "GOMP_parallel");
#endif
  return nullptr;
}

// All of this when the library is loaded, and not in the first call: a parent that has used torch's threads, but never
// ours, may fork before it. torch is there by then, for fastagg imports it first.
Pool* pool = new Pool;  // never deleted: helpers may outlive static destruction
GompParallel borrowed = torch_threads();
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { pool = new Pool, borrowed = nullptr; });

}  // namespace

void parallel(int threads, const std::function<void()>& work) {
  if (threads <= 1) return work();
  if (borrowed) return borrowed([](void* work) { (*(const std::function<void()>*)work)(); }, (void*)&work, threads, 0);
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
