// fastagg_native <test>: runs one of the tests of tests.h. No Python, so that sanitizers see nothing but our code.
#include "check.h"
#include "tests.h"

int main(int count, char** arguments) {
  const struct {
    const char* name;
    void (*run)();
  } tests[] = {{"products", test::products},
               {"mixing", test::mixing},
               {"times", test::times},
               {"ranking", test::ranking},
               {"conversions", test::conversions},
               {"streaming", test::streaming},
               {"threads", test::threads},
               {"forking", test::forking},
               {"interrupting", test::interrupting},
               {"waking", test::waking},
               {"glance", test::glance}};
  for (const auto& t : tests)
    if (count == 2 && std::strcmp(arguments[1], t.name) == 0) {
      t.run();
      std::printf("%s passed, up to %s\n", t.name, fastagg::simd_best());
      return 0;
    }
  std::fprintf(stderr, "usage: %s <test>; the tests:", arguments[0]);
  for (const auto& t : tests) std::fprintf(stderr, " %s", t.name);
  std::fputc('\n', stderr);
  return 2;
}
