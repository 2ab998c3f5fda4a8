#pragma once
#include <functional>

namespace fastagg {

// Runs work() on the calling thread and on up to threads - 1 helpers at once, and returns when all are done. There may
// be fewer helpers, or none, when others use them: concurrent and nested calls cannot deadlock. work must not throw.
// Works after fork(): the child starts helpers of its own.
void parallel(int threads, const std::function<void()>& work);

}  // namespace fastagg
