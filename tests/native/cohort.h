// Clients' models and outputs in memory. Every tensor is a block of its own, of exactly as many bytes as it needs: one
// byte further is an error that AddressSanitizer and valgrind see.
#pragma once
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "number.h"

namespace test {

// `bytes` bytes, `offset` bytes after an address that malloc gave; the last one is the last of malloc's block
class Exact {
 public:
  explicit Exact(size_t bytes, size_t offset = 0)
      : block_(static_cast<char*>(std::malloc(bytes + offset)), std::free), offset_(offset), bytes_(bytes) {
    CHECK(block_, "no memory");
    std::memset(data(), 0xa5, bytes);
  }
  char* data() const { return block_.get() + offset_; }
  size_t bytes() const { return bytes_; }

 private:
  std::unique_ptr<char, void (*)(void*)> block_;
  size_t offset_, bytes_;
};

struct Shape {
  int32_t dtype;
  int64_t numel;
};

inline std::vector<Shape> shapes(int32_t dtype, const std::vector<int64_t>& sizes) {
  std::vector<Shape> all;
  for (int64_t n : sizes) all.push_back({dtype, n});
  return all;
}

// Around the vectors of 4 to 16 elements, blocks of 64 to 256, sums of four blocks, and 8 KB of a client
inline const std::vector<int64_t> odd_sizes = {0,   1,   2,   3,    4,    5,    7,    8,    9,    15,   16,  17,
                                               31,  32,  33,  63,   64,   65,   127,  128,  129,  255,  256, 257,
                                               511, 513, 777, 1023, 1024, 1025, 2047, 2048, 2049, 4095, 4097};
inline const std::vector<int64_t> around_a_chunk = {16383, 16384, 16385, 16384 + 16, 33001};  // chunks: 16,384 elements

// small: integers of which every sum below is exact; uniform: in (-1, 1)
enum Fill { small, uniform };

class Cohort {
 public:
  static constexpr int rotating = -1;  // the next tensor lies one byte further from where malloc would put it

  Cohort(int64_t clients, const std::vector<Shape>& shapes, Fill fill, int offset = rotating, unsigned seed = 1)
      : clients(clients), random_(seed) {
    for (const Shape& s : shapes) {
      layer.push_back(is_floating(s.dtype) ? int32_t(layer.size()) : -1);
      row.push_back(0);
      dtype.push_back(s.dtype), numel.push_back(s.numel);
      center.push_back(make(s, fill, offset));
      for (int64_t k = 0; k < clients; ++k) client.push_back(make(s, fill, offset));
    }
  }
  int64_t tensors() const { return int64_t(numel.size()); }
  Table table() const { return {tensors(), clients, center.data(), client.data(), numel.data(), dtype.data()}; }

  // client k's tensor t; the center's for k = -1
  char* address(int64_t t, int64_t k) const { return (char*)(k < 0 ? center[t] : client[t * clients + k]); }
  char* element(int64_t t, int64_t k, int64_t e) const { return address(t, k) + e * dtype_bytes[dtype[t]]; }
  void set(int64_t t, int64_t k, int64_t e, double v) { encode(dtype[t], v, element(t, k, e)); }
  std::vector<double> values(int64_t t, int64_t k) const {
    std::vector<double> all(numel[t]);
    for (int64_t e = 0; e < numel[t]; ++e) all[e] = decode(dtype[t], element(t, k, e));
    return all;
  }

  int64_t clients;
  std::vector<int64_t> numel;
  std::vector<int32_t> dtype, layer, row;  // as they are: every tensor a layer of its own, integer ones none; row 0
  std::vector<const void*> center, client;

 private:
  const void* make(const Shape& s, Fill fill, int offset) {
    blocks_.emplace_back(s.numel * dtype_bytes[s.dtype], offset == rotating ? blocks_.size() % 67 : offset);
    char* at = blocks_.back().data();
    if (is_floating(s.dtype))
      for (int64_t e = 0; e < s.numel; ++e) encode(s.dtype, number(fill), at + e * dtype_bytes[s.dtype]);
    else
      for (size_t i = 0; i < blocks_.back().bytes(); ++i) at[i] = char(random_());
    return at;
  }
  double number(Fill fill) {
    const uint32_t bits = random_();
    return fill == small ? int(bits % 7) - 3 : int32_t(bits) * 0x1p-31;
  }

  std::minstd_rand random_;
  std::vector<Exact> blocks_;
};

// Where mix writes, at the same kind of addresses
struct Outputs {
  Outputs(const Cohort& c, int64_t outputs, int offset = Cohort::rotating)
      : outputs(outputs), tensors(c.tensors()), not_finite(c.tensors(), 0) {
    for (int64_t m = 0; m < outputs; ++m)
      for (int64_t t = 0; t < tensors; ++t) {
        const size_t at = offset == Cohort::rotating ? (blocks.size() * 3 + 1) % 67 : offset;
        blocks.emplace_back(c.numel[t] * dtype_bytes[c.dtype[t]], at);
        address.push_back(blocks.back().data());
      }
  }
  Mix mix(const Cohort& c, const std::vector<double>& weights) {
    return {weights.data(), c.row.data(), outputs, address.data(), not_finite.data()};
  }
  bool operator==(const Outputs& o) const {
    for (size_t i = 0; i < blocks.size(); ++i)
      if (std::memcmp(blocks[i].data(), o.blocks[i].data(), blocks[i].bytes())) return false;
    return not_finite == o.not_finite;
  }

  int64_t outputs, tensors;
  std::vector<Exact> blocks;   // [M, T]
  std::vector<void*> address;  // [M, T]
  std::vector<uint8_t> not_finite;
};

}  // namespace test
