#pragma once
#include <functional>

namespace fastagg {

// Runs work() on the calling thread and on up to threads - 1 helpers at once, and returns when all are done.
// The caller never waits for a helper to become free, so concurrent and nested calls cannot deadlock.
// work must not throw. Works after fork(): the child starts helpers of its own.
void parallel(int threads, const std::function<void()>& work);

}  // namespace fastagg
