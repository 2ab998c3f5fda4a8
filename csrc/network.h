// Sorting networks of a fixed number of rows, found by the compiler: for the kernels of the CPU and of GPUs.
#pragma once

namespace fastagg {

// Batcher's network of N rows: comparator c leaves the lower of two rows in row list.low[c]
template <int N> struct Network {
  static constexpr int comparators(short* low, short* high) {
    int found = 0, top = 1;
    while (top < N) top *= 2;
    for (int p = top / 2; p > 0; p /= 2)
      for (int q = top / 2, r = 0, d = p;; d = q - p, q /= 2, r = p) {
        for (int i = 0; i + d < N; ++i)
          if ((i & p) == r) {
            if (low) low[found] = short(i), high[found] = short(i + d);
            ++found;
          }
        if (q == p) break;
      }
    return found;
  }
  static constexpr int size = comparators(nullptr, nullptr);
  struct List {
    short low[size + 1], high[size + 1];
  };
  static constexpr List make() {
    List list{};
    comparators(list.low, list.high);
    return list;
  }
  static constexpr List list = make();
};

}  // namespace fastagg
