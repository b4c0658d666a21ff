// Calls every kernel on made data and prints a digest of what it gives: for a machine without Python; see try_aarch64.py.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

extern "C" {
const void* grace_loops(const char* isa);
void grace_signs_encode(const void*, const float*, const float*, float*, uint8_t*, float*, int64_t, int64_t, int64_t,
                        int64_t);
void grace_signs_mean(const void*, const uint8_t* const*, const float* const*, int64_t, float*, int64_t, int64_t,
                      int64_t);
void grace_ints_encode(const void*, const float*, const float*, float*, uint8_t*, float*, int64_t, int64_t, int64_t,
                       const uint16_t*, const uint16_t*, int64_t, int64_t, int64_t);
void grace_ints_mean(const void*, const uint8_t* const*, const float* const*, int64_t, float*, int64_t, int64_t, int64_t,
                     int64_t);
int64_t grace_topk_encode(const void*, const float*, const float*, float*, float*, int32_t*, int64_t, int64_t, int64_t,
                          int64_t);
int64_t grace_threshold_encode(const void*, const float*, const float*, float*, float, float*, int32_t*, int64_t, int64_t,
                               int64_t);
int64_t grace_sparse_mean(const void*, const float* const*, const int32_t* const*, const int64_t*, int64_t, float*,
                          int64_t, int64_t);
void grace_words(const void*, int64_t, int64_t, int64_t, int64_t, int32_t*, int64_t);
void grace_noise_table(const void*, int64_t, int64_t, int64_t, uint16_t*, int64_t);
void grace_product(const void*, const float*, const float*, const float*, float*, int64_t, int64_t, int64_t, int64_t);
void grace_part(const void*, float*, const float*, const float*, float*, int64_t, int64_t, int64_t, int64_t);
void grace_left(const void*, float*, const float*, const float*, float*, int64_t, int64_t, int64_t, int64_t);
void grace_right(const void*, const float*, const float*, float*, int64_t, int64_t, int64_t, int64_t);
}

namespace {

const void* loops;

std::vector<float> numbers(int64_t n, uint32_t seed) {  // of many magnitudes and both signs, exact on every machine
  std::vector<int32_t> words(static_cast<size_t>(n));
  grace_words(loops, seed, 1, 0, n, words.data(), 1);
  std::vector<float> found;
  for (int32_t word : words) found.push_back(std::ldexp(float(word >> 8), -40 + (word & 31)));
  return found;
}

template <class T>
uint64_t digest(const std::vector<T>& values) {
  uint64_t hash = 14695981039346656037u;
  const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
  for (size_t i = 0; i < values.size() * sizeof(T); i++) hash = (hash ^ bytes[i]) * 1099511628211u;
  return hash;
}

template <class... T>
void tell(const char* name, int64_t a, int64_t b, const T&... values) {
  printf("%s %lld %lld", name, static_cast<long long>(a), static_cast<long long>(b));
  const int unused[] = {(printf(" %016llx", static_cast<unsigned long long>(digest(values))), 0)...};
  (void)unused;
  printf("\n");
}

void sums(const char* name, int64_t a, int64_t b, const std::vector<float>& values) {  // whose last bits may differ
  double total = 0, size = 0;
  for (float value : values) total += value, size += std::fabs(value);
  printf("%s %lld %lld %.4e %.4e\n", name, static_cast<long long>(a), static_cast<long long>(b), total, size);
}

}  // namespace

int main(int, char** argv) {
  loops = grace_loops(argv[1]);
  if (!loops) return 2;
  std::vector<uint16_t> table(2 * 65536), offsets(64);
  grace_noise_table(loops, 5, 6, 65536, table.data(), 1);
  std::memcpy(table.data() + 65536, table.data(), 65536 * 2);
  tell("noise", 0, 0, table);
  for (size_t i = 0; i < offsets.size(); i++) offsets[i] = uint16_t(i * 40503u);
  for (int64_t n : {1, 7, 16, 100, 513, 4099, 70001, 300000}) {
    const auto x = numbers(n, 2), residual = numbers(n, 3);
    const size_t size = static_cast<size_t>(n);
    for (int64_t block : {int64_t(0), int64_t(512)}) {
      const size_t blocks = block ? size_t((n + block - 1) / block) : 1;
      std::vector<uint8_t> bits((size + 7) / 8), others(bits.size());
      std::vector<float> out(size), scales(blocks), other_scales(blocks), mean(size);
      grace_signs_encode(loops, x.data(), residual.data(), out.data(), bits.data(), scales.data(), n, block, 0, 1);
      grace_signs_encode(loops, residual.data(), nullptr, nullptr, others.data(), other_scales.data(), n, block, 0, 1);
      tell("signs", n, block, out, bits, scales);
      const uint8_t* both[] = {bits.data(), others.data()};
      const float* both_scales[] = {scales.data(), other_scales.data()};
      grace_signs_mean(loops, both, both_scales, 2, mean.data(), n, block, 1);
      tell("signs mean", n, block, mean);
      for (int64_t width : {8, 4, 2}) {
        std::vector<uint8_t> codes((size * size_t(width) + 7) / 8), more(codes.size());
        grace_ints_encode(loops, x.data(), residual.data(), out.data(), codes.data(), scales.data(), n, block, width,
                          table.data(), offsets.data(), 0, 0, 1);
        grace_ints_encode(loops, residual.data(), nullptr, nullptr, more.data(), other_scales.data(), n, block, width,
                          nullptr, nullptr, 0, 0, 1);
        tell("integers", n, block * 10 + width, out, codes, more, scales);
        const uint8_t* all[] = {codes.data(), more.data()};
        grace_ints_mean(loops, all, both_scales, 2, mean.data(), n, block, width, 1);
        tell("integers mean", n, block * 10 + width, mean);
      }
    }
    const int64_t k = n / 50 + 1;
    std::vector<float> values(size_t(k), 0), out(size), mean(size);
    std::vector<int32_t> positions(size_t(k), 0);
    grace_topk_encode(loops, x.data(), residual.data(), out.data(), values.data(), positions.data(), n, k, 0, 1);
    tell("topk", n, k, out, values, positions);
    const float* values_of[] = {values.data()};
    const int32_t* positions_of[] = {positions.data()};
    const int64_t counts[] = {k};
    grace_sparse_mean(loops, values_of, positions_of, counts, 1, mean.data(), n, 1);
    tell("sparse mean", n, k, mean);
    std::vector<float> found(size + 64);
    std::vector<int32_t> at(size + 64);
    const int64_t count =
        grace_threshold_encode(loops, x.data(), nullptr, out.data(), 0.25f, found.data(), at.data(), n + 64, n, 1);
    found.resize(size_t(count)), at.resize(size_t(count));
    tell("threshold", n, count, out, found, at);
  }
  for (int64_t a : {1, 5, 64, 333}) {
    for (int64_t b : {1, 31, 64, 1100}) {
      for (int64_t r : {1, 2, 4, 9}) {
        auto m = numbers(a * b, 7);
        const auto p = numbers(a * r, 8), q = numbers(r * b, 9), residual = numbers(a * b, 10);
        std::vector<float> out(size_t(a * b)), left(size_t(a * r)), right(size_t(r * b));
        grace_product(loops, m.data(), p.data(), q.data(), out.data(), a, b, r, 1);
        tell("product", a * 10000 + b, r, out);
        grace_left(loops, m.data(), residual.data(), q.data(), left.data(), a, b, r, 1);
        sums("left", a * 10000 + b, r, left);
        tell("compensated", a * 10000 + b, r, m);
        grace_right(loops, m.data(), p.data(), right.data(), a, b, r, 1);
        sums("right", a * 10000 + b, r, right);
        grace_part(loops, m.data(), p.data(), q.data(), out.data(), a, b, r, 1);
        tell("part", a * 10000 + b, r, m, out);
      }
    }
  }
}
