// A check that says where and why it failed and ends the process: no test goes on with memory that may be broken.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "../../csrc/fastagg.h"

namespace test {

[[noreturn]] __attribute__((format(printf, 4, 5))) inline void failed(const char* file, int line, const char* condition,
                                                                      const char* format, ...) {
  std::fprintf(stderr, "%s:%d: %s does not hold (%s): ", file, line, condition, fastagg::simd_level());
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
  std::_Exit(1);  // from whatever thread
}

// CHECK(condition, printf arguments that say what was being tested)
#define CHECK(condition, ...) ((condition) ? void() : ::test::failed(__FILE__, __LINE__, #condition, __VA_ARGS__))

// f() once for every SIMD level that this machine has
template <class F> void at_every_level(const F& f) {
  for (int i = 0; const char* level = fastagg::simd_name(i); ++i) {
    CHECK(fastagg::set_simd(level), "%s", level);
    if (std::strcmp(fastagg::simd_level(), level) == 0) f();
  }
  fastagg::set_simd("auto");
}

}  // namespace test
