// The C interface (api.h): splits work over threads and blocks, and handles single elements. The loops are in loops.cc,
// compiled into separate libraries.
//
// Results do not depend on the number of threads. They do not depend on the instruction set, except for NaN's bits and the
// last bits of left, right and the cosine coefficients.
#include "kernels.h"

#include "api.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#ifdef __x86_64__
#include <cpuid.h>
#endif

using grace::Found;
using grace::Halves;
using grace::Levels;
using grace::Loops;
using grace::Noise;
using grace::Normal;
using grace::Out;
using grace::Rotation;
using grace::Runs;
using grace::Steps;

namespace {

constexpr int64_t PIECE = 65536;             // elements of a large block that are summed together
constexpr int64_t ALONE = 262144;            // below this many elements, threads do not pay
int64_t streamed = int64_t(4) << 20;         // from this many elements on, results exceed the caches
thread_local int64_t gathered = 0;           // elements of all results of one series of calls
constexpr int64_t SMALL = 16384;             // below this many elements, streaming stores do not pay
constexpr int32_t INFINITE = 0x7f800000;     // the bits of infinity
constexpr int32_t MAGNITUDE = 0x7fffffff;

// Calls work(begin, end, index) on threads, for parts of 0 .. n that begin at multiples of `unit`.
template <class Work>
void split(int64_t n, int64_t unit, int64_t threads, const Work& work) {
  const int64_t units = (n + unit - 1) / unit;
  threads = n > ALONE ? std::max<int64_t>(1, std::min(threads, units)) : 1;
  if (threads == 1) return work(int64_t(0), n, int64_t(0));
  const auto begin = [&](int64_t t) { return std::min(n, units * t / threads * unit); };
  std::vector<std::thread> others;
  others.reserve(size_t(threads));
  for (int64_t t = 1; t < threads; t++) {
    try {
      others.emplace_back([&work, begin, t] { work(begin(t), begin(t + 1), t); });
    } catch (const std::system_error&) {  // cannot start a thread
      work(begin(t), begin(t + 1), t);
    }
  }
  work(int64_t(0), begin(1), int64_t(0));
  for (auto& other : others) other.join();
}

template <class T>
T* at(T* p, int64_t offset) {
  return p ? p + offset : nullptr;
}

template <class T>
T get(const T* p, int64_t i) {
  T value;
  memcpy(&value, reinterpret_cast<const char*>(p) + i * int64_t(sizeof(T)), sizeof(T));
  return value;
}

template <class T>
void set(T* p, int64_t i, T value) {
  memcpy(reinterpret_cast<char*>(p) + i * int64_t(sizeof(T)), &value, sizeof(T));
}

int32_t bits_of(float x) {
  int32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

float float_of(int32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

int32_t key(float x) { return std::min(bits_of(x) & MAGNITUDE, INFINITE); }

// Streaming stores pay for large results whose cache lines have not just been read.
bool streams(const float* x, const float* residual, const float* out, int64_t n) {
  const bool many = n >= streamed || (n >= SMALL && gathered >= streamed);
  return many && out && out != x && out != residual && reinterpret_cast<uintptr_t>(out) % 16 == 0;
}

// How to write the residual; `swap`: in place of the old one, which is moved to x.
Out form_of(const float* x, const float* residual, const float* out, int64_t n, int64_t swap) {
  if (!out) return grace::NONE;
  if (swap && residual) return grace::SWAPPED;
  return streams(x, residual, out, n) ? grace::STREAMED : grace::KEPT;
}

// Processes a large block in pieces: statistic(begin, size) of each, scale(statistics), then emit(begin, size, scale) of
// each, the last piece first because it may still be cached.
template <class Statistic, class Scale, class Emit>
void in_pieces(int64_t n, int64_t threads, const Statistic& statistic, const Scale& scale, const Emit& emit) {
  using Value = decltype(statistic(int64_t(0), int64_t(0)));
  std::vector<Value> found(size_t((n + PIECE - 1) / PIECE));
  split(n, PIECE, threads, [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t i = begin; i < end; i += PIECE) found[size_t(i / PIECE)] = statistic(i, std::min(PIECE, end - i));
  });
  const auto whole = scale(found);
  split(n, PIECE, threads, [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t i = (end - 1) / PIECE * PIECE; i >= begin; i -= PIECE) emit(i, std::min(PIECE, end - i), whole);
  });
}

// found[3]: the sums over all pieces, in order, so that they do not depend on the number of threads.
template <class Piece>
void excess_of(int64_t n, int64_t threads, double* found, const Piece& piece) {
  n = std::max<int64_t>(n, 0);
  std::vector<grace::Excess> pieces(size_t((n + PIECE - 1) / PIECE));
  split(n, PIECE, threads, [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t i = begin; i < end; i += PIECE) pieces[size_t(i / PIECE)] = piece(i, std::min(PIECE, end - i));
  });
  grace::Excess all = {};
  for (const auto& each : pieces) all.count += each.count, all.sum += each.sum, all.squares += each.squares;
  set(found, 0, double(all.count)), set(found, 1, all.sum), set(found, 2, all.squares);
}

}  // namespace

// Uses CPUID directly: the data of __builtin_cpu_supports is zero if Zig links.
API int64_t grace_supports(const char* isa) {
#if defined(__x86_64__)
  unsigned a, b, c, d, system, upper;
  if (__get_cpuid(1, &a, &b, &c, &d) && (c & bit_OSXSAVE)) {
    const bool fma = (c & bit_FMA) && (c & bit_POPCNT);
    __asm__("xgetbv" : "=a"(system), "=d"(upper) : "c"(0));  // registers that the operating system saves
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
      const bool avx2 = (system & 6) == 6 && fma && (b & bit_AVX2) && (b & bit_BMI) && (b & bit_BMI2);
      const bool avx512 = (system & 0xe6) == 0xe6 && avx2 && (b & bit_AVX512F) && (b & bit_AVX512BW) &&
                          (b & bit_AVX512DQ) && (b & bit_AVX512VL);
      if (!strcmp(isa, "avx512")) return avx512;
      if (!strcmp(isa, "avx2")) return avx2;
    }
  }
#elif defined(__aarch64__)
  if (!strcmp(isa, "neon")) return 1;
#endif
  return !strcmp(isa, "scalar");
}

// For tests: set the number of elements from which results use streaming stores. Returns the previous one.
API int64_t grace_stream_from(int64_t n) {
  std::swap(n, streamed);
  return n;
}

API int64_t grace_gathered(const Loops*, int64_t n) {
  std::swap(n, gathered);
  return n;
}

API const char* grace_name(const Loops* loops) { return loops->name; }

API void grace_signs_encode(const Loops* loops, const float* x, const float* residual, float* out, uint8_t* bits,
                            float* scales, int64_t n, int64_t block, int64_t threads, int64_t swap) {
  if (n <= 0) return;
  if (block <= 0 || block > n) block = n;
  const Out form = form_of(x, residual, out, n, swap);
  if (block <= PIECE)
    return split(n, block, threads, [=](int64_t begin, int64_t end, int64_t) {
      loops->signs_blocks(x + begin, at(residual, begin), at(out, begin), bits + begin / 8, scales + begin / block,
                          end - begin, block, form);
    });
  for (int64_t start = 0, b = 0; start < n; start += block, b++) {
    const int64_t size = std::min(block, n - start);
    in_pieces(
        size, threads,
        [=](int64_t i, int64_t count) { return loops->signs_total(x + start + i, at(residual, start + i), count); },
        [=](const std::vector<double>& totals) {
          double total = 0;
          for (const double each : totals) total += each;
          const float scale = float(total) / float(size);
          set(scales, b, scale);
          return scale;
        },
        [=](int64_t i, int64_t count, float scale) {
          loops->signs_emit(x + start + i, at(residual, start + i), at(out, start + i), bits + (start + i) / 8, scale,
                            count, form);
        });
  }
}

API void grace_signs_mean(const Loops* loops, const uint8_t* const* bits, const float* const* scales, int64_t workers,
                          float* out, int64_t n, int64_t block, int64_t threads) {
  if (n <= 0) return;
  if (block <= 0 || block > n) block = n;
  const bool stream = streams(nullptr, nullptr, out, n);
  split(n, block == n ? PIECE : block, threads, [=](int64_t begin, int64_t end, int64_t) {
    loops->signs_sum(bits, scales, workers, out, begin, end, block, stream);
  });
}

API void grace_ints_encode(const Loops* loops, const float* x, const float* residual, float* out, uint8_t* codes,
                           float* scales, int64_t n, int64_t block, int64_t bits, const uint16_t* table,
                           const uint16_t* offsets, int64_t start, int64_t threads, int64_t swap) {
  if (n <= 0) return;
  if (block <= 0 || block > n) block = n;
  const Out form = form_of(x, residual, out, n, swap);
  const Noise noise = {table, offsets, start / 65536, start};
  const int width = int(bits);
  if (block <= PIECE)
    return split(n, block, threads, [=](int64_t begin, int64_t end, int64_t) {
      loops->ints_blocks(x + begin, at(residual, begin), at(out, begin), codes + begin * width / 8,
                         scales + begin / block, end - begin, block, width, &noise, begin, form);
    });
  for (int64_t from = 0, b = 0; from < n; from += block, b++) {
    in_pieces(
        std::min(block, n - from), threads,
        [=](int64_t i, int64_t count) { return loops->ints_largest(x + from + i, at(residual, from + i), count); },
        [=](const std::vector<int32_t>& largest) {
          const float scale = float_of(*std::max_element(largest.begin(), largest.end()));
          set(scales, b, scale);
          return scale;
        },
        [=](int64_t i, int64_t count, float scale) {
          loops->ints_emit(x + from + i, at(residual, from + i), at(out, from + i), codes + (from + i) * width / 8,
                           scale, count, width, &noise, from + i, form);
        });
  }
}

API void grace_ints_mean(const Loops* loops, const uint8_t* const* codes, const float* const* scales, int64_t workers,
                         float* out, int64_t n, int64_t block, int64_t bits, int64_t threads) {
  if (n <= 0) return;
  if (block <= 0 || block > n) block = n;
  const bool stream = streams(nullptr, nullptr, out, n);
  split(n, block == n ? PIECE : block, threads, [=](int64_t begin, int64_t end, int64_t) {
    loops->ints_sum(codes, scales, workers, out, begin, end, block, int(bits), stream);
  });
}

// ---- top-k -----------------------------------------------------------------------------------------------------------

namespace {

// Candidates in ascending order of position. Not a std::vector, which would zero new elements.
struct Candidates {
  float* values = nullptr;
  int32_t* positions = nullptr;
  int64_t count = 0, capacity = 0;

  Candidates() = default;
  Candidates(const Candidates&) = delete;
  Candidates& operator=(const Candidates&) = delete;
  ~Candidates() { release(); }
  void release() {
    free(values);
    free(positions);
    values = nullptr, positions = nullptr, count = capacity = 0;
  }
  bool reserve(int64_t size) {
    if (size <= capacity) return true;
    float* v = static_cast<float*>(realloc(values, size_t(size) * 4));
    if (v) values = v;
    int32_t* p = static_cast<int32_t*>(realloc(positions, size_t(size) * 4));
    if (p) positions = p;
    if (v && p) capacity = size;
    return v && p;
  }
};

constexpr int64_t MOST_KEPT = int64_t(4) << 20;  // candidates that a thread's scratch may keep between calls

// The k-th largest key of the candidates, 1 <= k <= count. Bins the range of keys, then repeatedly the bin that holds it.
int32_t kth_key(const Loops* loops, const Candidates& all, int64_t k) {
  constexpr int BINS = 2048, FEW = 512;
  int32_t low = INT32_MAX, high = 0;
  if (all.count <= FEW) {  // a bitwise search is faster than bins
    int32_t keys[FEW] = {};
    for (int64_t i = 0; i < all.count; i++) keys[i] = key(all.values[i]);
    const int32_t bound = loops->methods->bound_of(keys, (all.count + 15) / 16 * 16, k);
    for (int64_t i = 0; i < all.count; i++) low = std::min(low, keys[i] >= bound ? keys[i] : INT32_MAX);
    return low;
  }
  for (int64_t i = 0; i < all.count; i++) {
    const int32_t each = key(all.values[i]);
    low = std::min(low, each), high = std::max(high, each);
  }
  while (low < high) {
    int shift = 0;
    while ((uint32_t(high - low) >> shift) >= uint32_t(BINS)) shift++;
    int64_t bins[BINS] = {};
    const uint32_t range = uint32_t(high - low);
    for (int64_t i = 0; i < all.count; i++) {
      const uint32_t above = uint32_t(key(all.values[i])) - uint32_t(low);
      if (above <= range) bins[above >> shift]++;
    }
    int bin = BINS - 1;
    while (bins[bin] < k) k -= bins[bin--];
    low += int32_t(uint32_t(bin) << shift);
    high = std::min(high, low + int32_t((1u << shift) - 1));
  }
  return low;
}

// Keeps the k largest (at ties, the lower positions) and restores the others to out, which may be null. Returns the
// smallest key kept.
int32_t keep_largest(const Loops* loops, Candidates& all, int64_t k, float* out) {
  if (all.count == 0 || k == 0) return 0;
  k = std::min(k, all.count);
  const int32_t bound = kth_key(loops, all, k);
  int64_t ties = k, kept = 0;
  for (int64_t i = 0; i < all.count; i++) ties -= key(all.values[i]) > bound;
  for (int64_t i = 0; i < all.count; i++) {
    const float value = all.values[i];
    const int32_t position = all.positions[i], each = key(value);
    if (each > bound || (each == bound && ties-- > 0)) {
      all.values[kept] = value;
      all.positions[kept++] = position;
    } else if (out) {
      set(out, position, value);
    }
  }
  all.count = kept;
  return bound;
}

// Collects candidates: elements begin .. end with key >= bound, reduced to the k largest if there are too many. out =
// x + residual, with zeros in place of candidates. Returns false if memory runs out.
bool collect(const Loops* loops, const float* x, const float* residual, float* out, int64_t begin, int64_t end,
             int32_t bound, int64_t k, int64_t expected, Out form, Candidates& all, int64_t& reached) {
  const int64_t limit = 2 * k + 4096;
  all.count = 0, reached = begin;
  if (!all.reserve(std::min(limit, expected + expected / 4 + 1024))) return false;
  while (begin < end) {
    const Found found =
        loops->select(x + begin, at(residual, begin), at(out, begin), end - begin, bound, INFINITE,
                      all.values + all.count, all.positions + all.count, all.capacity - all.count, int32_t(begin), form);
    begin += found.read, reached = begin;
    all.count += found.count;
    if (begin >= end) break;
    if (all.capacity < limit) {
      if (!all.reserve(std::min(limit, 2 * all.capacity))) return false;
    } else {  // later elements must exceed the smallest of these: at ties, the first wins
      bound = keep_largest(loops, all, k, out) + 1;
    }
  }
  return true;
}

// Keys of a stratified sample of x + residual.
std::vector<int32_t> sample(const float* x, const float* residual, int64_t n) {
  const int64_t size = std::min<int64_t>(n, std::clamp<int64_t>(n / 256, 1024, 65536));
  std::vector<int32_t> keys;
  keys.resize(size_t(size));
  uint32_t state = 0x9E3779B9;
  for (int64_t i = 0; i < size; i++) {
    const int64_t from = n * i / size, width = n * (i + 1) / size - from;
    state = state * 1664525u + 1013904223u;
    const int64_t j = from + int64_t((uint64_t(state) * uint64_t(width)) >> 32);
    keys[size_t(i)] = key(residual ? get(x, j) + get(residual, j) : get(x, j));
  }
  return keys;
}

}  // namespace

API int64_t grace_topk_encode(const Loops* loops, const float* x, const float* residual, float* out, float* values,
                              int32_t* positions, int64_t n, int64_t k, int64_t threads, int64_t swap) {
  if (n <= 0) return 0;
  k = std::clamp<int64_t>(k, 0, n);
  Out form = form_of(x, residual, out, n, swap);
  threads = n > ALONE && threads > 1 ? std::min<int64_t>(threads, 64) : 1;
  static thread_local Candidates kept_scratch;
  const bool swapped = form == grace::SWAPPED;
  const float* const spent = x;
  int64_t begun[64] = {}, reached[64] = {};  // in the first pass of each thread
  const auto fail = [&] {
    for (int64_t t = 0; swapped && t < 64; t++)
      memcpy(reinterpret_cast<char*>(out) + begun[t] * 4, reinterpret_cast<const char*>(spent) + begun[t] * 4,
             size_t(reached[t] - begun[t]) * 4);
    return int64_t(-2);
  };
  try {
    std::vector<Candidates> own(size_t(threads - 1));
    const auto scratch = [&](int64_t t) -> Candidates& { return t ? own[size_t(t - 1)] : kept_scratch; };

    std::vector<int32_t> keys = sample(x, residual, n);
    const double share = double(k) / double(n), expected_rank = share * double(keys.size());
    double rank = expected_rank + 3 * std::max(1.0, __builtin_sqrt(expected_rank * (1 - share))) + 1;
    for (;; rank *= 2) {
      int32_t bound = 0;
      int64_t expected = n;
      if (k == 0) {
        bound = INT32_MAX, expected = 0;
      } else if (rank < double(keys.size())) {
        std::nth_element(keys.begin(), keys.begin() + int64_t(rank), keys.end(), std::greater<int32_t>());
        bound = keys[size_t(rank)];
        expected = int64_t(rank / double(keys.size()) * double(n));
      }
      bool failed[64] = {};
      split(n, 4096, threads, [&](int64_t begin, int64_t end, int64_t t) {
        int64_t again = 0;
        if (residual) begun[t] = begin;
        failed[t] = !collect(loops, x, residual, out, begin, end, bound, k, expected / threads, form, scratch(t),
                             residual ? reached[t] : again);
      });
      for (const bool each : failed)
        if (each) return fail();
      int64_t count = kept_scratch.count;
      for (const auto& each : own) count += each.count;
      if (count >= k || bound == 0) {
        if (!kept_scratch.reserve(count)) return fail();
        for (const auto& each : own) {
          if (!each.count) continue;
          memcpy(kept_scratch.values + kept_scratch.count, each.values, size_t(each.count) * 4);
          memcpy(kept_scratch.positions + kept_scratch.count, each.positions, size_t(each.count) * 4);
          kept_scratch.count += each.count;
        }
        keep_largest(loops, kept_scratch, k, out);
        if (k) {
          memcpy(values, kept_scratch.values, size_t(k) * 4);
          memcpy(positions, kept_scratch.positions, size_t(k) * 4);
        }
        if (kept_scratch.capacity > MOST_KEPT) kept_scratch.release();
        return 0;
      }
      if (!out) continue;
      // Too few: restore all elements, and read from out from now on.
      for (int64_t t = 0; t < threads; t++)
        for (int64_t i = 0; i < scratch(t).count; i++) set(out, scratch(t).positions[i], scratch(t).values[i]);
      x = out, residual = nullptr, form = grace::KEPT;
    }
  } catch (const std::bad_alloc&) {
    return fail();
  }
}

API int64_t grace_topk_rows(const Loops* loops, const float* x, int64_t m, int64_t n, int64_t k, int32_t* positions,
                            int64_t threads) {
  if (m <= 0 || n <= 0 || k <= 0) return 0;
  k = std::min(k, n);
  bool failed[64] = {};
  split(m * n, n, std::min<int64_t>(threads, 64), [&](int64_t begin, int64_t end, int64_t t) {
    Candidates found;
    int32_t bound = 0;  // a guess: slightly below the bound of the previous row
    for (int64_t row = begin / n; row < end / n; row++) {
      const float* from = x + row * n;
      int64_t reached = 0;
      bool done = collect(loops, from, nullptr, nullptr, 0, n, bound, k, 4 * k, grace::NONE, found, reached);
      if (done && found.count < k)
        done = collect(loops, from, nullptr, nullptr, 0, n, 0, k, n, grace::NONE, found, reached);
      if (!done) {
        failed[t] = true;
        return;
      }
      bound = std::max(0, keep_largest(loops, found, k, nullptr) - (1 << 21));
      memcpy(reinterpret_cast<char*>(positions) + row * k * 4, found.positions, size_t(k) * 4);
    }
  });
  return std::find(failed, failed + 64, true) == failed + 64 ? 0 : -2;
}

// ---- kept elements ---------------------------------------------------------------------------------------------------

API int64_t grace_accumulate(const Loops* loops, float* x, float* last, float beta, float gamma, double* found, int64_t n,
                             int64_t threads) try {
  if (found)
    excess_of(n, threads, found, [=](int64_t i, int64_t size) {
      return loops->methods->accumulate(x + i, last + i, beta, gamma, size);
    });
  else
    split(n, 16, threads, [=](int64_t begin, int64_t end, int64_t) {
      loops->accumulate(x + begin, last + begin, beta, gamma, end - begin);
    });
  return 0;
} catch (const std::bad_alloc&) {
  return -2;
}

// ---- threshold -------------------------------------------------------------------------------------------------------

namespace {

// Returns how many of begin .. end are chosen. Writes the first `capacity` of them; restores the others to out.
int64_t choose(const Loops* loops, const float* x, const float* residual, float* out, int64_t begin, int64_t end,
               int32_t bound, float* values, int32_t* positions, int64_t capacity, Out form) {
  constexpr int64_t CHUNK = 4096;
  float chosen[CHUNK + 16];
  int32_t where[CHUNK + 16];
  int64_t count = 0;
  for (int64_t i = begin; i < end; i += CHUNK) {
    const int64_t found = loops->select(x + i, at(residual, i), at(out, i), std::min(CHUNK, end - i), bound, MAGNITUDE,
                                        chosen, where, CHUNK + 16, int32_t(i), form).count;
    const int64_t fit = std::clamp<int64_t>(capacity - count, 0, found);
    if (fit) {
      memcpy(reinterpret_cast<char*>(values) + 4 * count, chosen, size_t(fit) * 4);
      memcpy(reinterpret_cast<char*>(positions) + 4 * count, where, size_t(fit) * 4);
    }
    for (int64_t j = fit; out && j < found; j++) set(out, where[j], chosen[j]);
    count += found;
  }
  return count;
}

void put_back(float* out, const float* values, const int32_t* positions, int64_t count) {
  for (int64_t i = 0; out && i < count; i++) set(out, get(positions, i), get(values, i));
}

// Selects elements whose magnitude bits reach `least`.
int64_t reaching(const Loops* loops, const float* x, const float* residual, float* out, int32_t least, float* values,
                 int32_t* positions, int64_t capacity, int64_t n, int64_t threads) {
  if (n <= 0) return 0;
  const Out form = form_of(x, residual, out, n, 0);
  if (threads > 1 && n > ALONE && capacity >= 4096) {  // each thread fills its share of the arrays
    threads = std::min<int64_t>(threads, 64);
    const int64_t share = capacity / threads;
    int64_t counts[64] = {};
    split(n, 4096, threads, [&](int64_t begin, int64_t end, int64_t t) {
      counts[t] = choose(loops, x, residual, out, begin, end, least, values + t * share, positions + t * share, share,
                         form);
    });
    int64_t count = 0;
    const bool fits = *std::max_element(counts, counts + threads) <= share;
    for (int64_t t = 0; t < threads; t++) {
      if (fits) {
        memmove(values + count, values + t * share, size_t(counts[t]) * 4);
        memmove(positions + count, positions + t * share, size_t(counts[t]) * 4);
      } else {
        put_back(out, values + t * share, positions + t * share, std::min(share, counts[t]));
      }
      count += counts[t];
    }
    if (fits || count > capacity) return count;
    if (out) x = out, residual = nullptr;  // the total fits, but not every share: repeat on one thread
  }
  const int64_t count = choose(loops, x, residual, out, 0, n, least, values, positions, capacity, form);
  if (count > capacity) put_back(out, values, positions, capacity);
  return count;
}

}  // namespace

API int64_t grace_threshold_encode(const Loops* loops, const float* x, const float* residual, float* out, float bound,
                                   float* values, int32_t* positions, int64_t capacity, int64_t n, int64_t threads) {
  const int32_t least = bound > 0 ? bits_of(bound) : 0;
  return reaching(loops, x, residual, out, least, values, positions, capacity, n, threads);
}

API int64_t grace_beyond(const Loops* loops, const float* x, float bound, float* values, int32_t* positions,
                         int64_t capacity, int64_t n, int64_t threads) {
  const int32_t least = bound > 0 ? bits_of(bound) + 1 : bound == 0 ? 1 : 0;  // if NaN, all elements are above
  return reaching(loops, x, nullptr, nullptr, least, values, positions, capacity, n, threads);
}

// ---- sparse mean -----------------------------------------------------------------------------------------------------

API int64_t grace_sparse_means(const Loops* loops, const float* const* values, const int32_t* const* positions,
                               const int64_t* counts, const uint8_t* pairs, int64_t vectors, int64_t each, float* out,
                               int64_t n, int64_t threads) try {
  constexpr int64_t TILE = 4096;
  const bool stream = streams(nullptr, nullptr, out, n);
  threads = n > ALONE && threads > 1 ? std::min<int64_t>(threads, 64) : 1;
  const auto position = [=](int64_t w, int64_t i) {  // negative positions become huge
    const int32_t sent = get(positions[w], i);
    return uint32_t(pairs && pairs[w] && sent < 0 ? ~sent : sent);
  };
  if (n <= 0) {
    for (int64_t w = 0; w < vectors; w++)
      if (counts[w] > 0) return w;
    return -1;
  }
  const int64_t tiles = (n + TILE - 1) / TILE;
  threads = std::min(threads, tiles);
  std::vector<int64_t> cuts(size_t((threads + 1) * vectors));  // start of each thread's part in the positions
  for (int64_t t = 0; t <= threads; t++) {
    for (int64_t w = 0; w < vectors; w++) {
      int64_t low = t == threads ? counts[w] : 0, high = t == 0 ? 0 : counts[w];
      const int64_t bound = tiles * t / threads * TILE;
      while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (int64_t(position(w, middle)) < bound)
          low = middle + 1;
        else
          high = middle;
      }
      cuts[size_t(t * vectors + w)] = low;
    }
  }
  std::vector<int64_t> reached = cuts;
  split(n, TILE, threads, [&](int64_t begin, int64_t end, int64_t t) {
    alignas(64) float tile[TILE];
    int64_t* next = &reached[size_t(t * vectors)];
    for (int64_t from = begin; from < end; from += TILE) {
      const int64_t size = std::min(TILE, end - from);
      memset(tile, 0, size_t(size) * 4);
      for (int64_t w = 0; w < vectors; w++) {
        const bool pair = pairs && pairs[w];
        const float both[2] = {pair ? get(values[w], 0) : 0.0f, pair ? get(values[w], 1) : 0.0f};
        int64_t i = next[w], previous = -1;
        for (const int64_t count = counts[w]; i < count; i++) {
          const int32_t sent = get(positions[w], i), negative = pair && sent < 0;
          const int64_t j = int64_t(uint32_t(sent ^ -negative)) - from;
          if (j >= size || j <= previous) break;  // in a later tile; if positions do not ascend, it stops here for good
          tile[j] += pair ? both[negative] : get(values[w], i);
          previous = j;
        }
        next[w] = i;
      }
      loops->divide(tile, out + from, size, vectors / each, stream);
    }
  });
  for (int64_t w = 0; w < vectors; w++)
    for (int64_t t = 0; t < threads; t++)
      if (reached[size_t(t * vectors + w)] != cuts[size_t((t + 1) * vectors + w)]) return w;
  return -1;
} catch (const std::bad_alloc&) {
  return -2;
}

API int64_t grace_sparse_mean(const Loops* loops, const float* const* values, const int32_t* const* positions,
                              const int64_t* counts, int64_t workers, float* out, int64_t n, int64_t threads) {
  return grace_sparse_means(loops, values, positions, counts, nullptr, workers, 1, out, n, threads);
}

// ---- a threshold from a sample ---------------------------------------------------------------------------------------

API int64_t grace_sampled(const Loops* loops, const float* x, int64_t n, int64_t key0, int64_t key1, int64_t start,
                          int64_t sample, int64_t rank, const float* factors, const float* miss, int64_t many,
                          int64_t first, int64_t k, int64_t most, float* values, int32_t* positions, int64_t capacity,
                          int64_t threads) try {
  constexpr int64_t TILE = 1024, MANY = 255;
  if (n <= 0 || sample <= 0 || rank <= 0 || many < 1 || many > MANY) return 0;
  std::vector<float> drawn, largest;
  std::vector<int32_t> where;
  rank = std::min(rank, sample);
  const int64_t wide = std::min(sample, 3 * rank + 16);
  drawn.resize(size_t(sample)), largest.resize(size_t(wide)), where.resize(size_t(wide));
  for (int64_t i = 0; i < sample; i += TILE) {
    int32_t words[TILE];
    const int64_t size = std::min(TILE, sample - i);
    loops->words(uint32_t(key0), uint32_t(key1), start + i, size, words);
    for (int64_t j = 0; j < size; j++) {
      const float value = get(x, int64_t(uint32_t(words[j] & MAGNITUDE) % uint32_t(n)));
      drawn[size_t(i + j)] = key(value) == INFINITE ? 0.0f : value;
    }
  }
  if (grace_topk_encode(loops, drawn.data(), nullptr, nullptr, largest.data(), where.data(), sample, wide, 0, 1))
    return -2;
  std::nth_element(largest.begin(), largest.begin() + (rank - 1), largest.end(),
                   [](float a, float b) { return key(a) > key(b); });
  const int32_t least = key(largest[size_t(rank - 1)]);
  int32_t lowest = least;
  for (const float each : largest) lowest = std::min(lowest, key(each));
  float candidates[MANY];
  for (int64_t j = 0; j < many; j++) candidates[j] = float_of(least) * factors[j];
  if (first)
    for (first = 0; first + 1 < many && candidates[first + 1] < float_of(lowest);) first++;
  for (;; first = 0) {
    const int64_t count = grace_beyond(loops, x, candidates[first], values, positions, capacity, n, threads);
    if (count > capacity) return -3 - count;
    // The number of candidates below an element. Non-finite elements exceed none.
    const auto below = [&](float value) {
      const int32_t each = key(value);
      if (each == INFINITE) return int64_t{0};
      return std::lower_bound(candidates + first, candidates + many, float_of(each)) - candidates;
    };
    int64_t above[MANY + 1] = {};
    for (int64_t i = 0; i < count; i++) above[below(get(values, i))]++;
    for (int64_t j = many, sum = 0; j >= 0; j--) {  // from counts between candidates to counts above each
      const int64_t here = above[j];
      above[j] = sum, sum += here;
    }
    for (int64_t j = 0; j < first; j++) above[j] = above[first];
    int64_t best = 0;
    float nearest = 0;
    for (int64_t j = 0; j < many; j++) {
      const float off = __builtin_fabsf(std::min(float(int32_t(above[j])), float(most)) - float(k)) + miss[j];
      if (j == 0 || off < nearest) best = j, nearest = off;
    }
    if (first && (above[first] < most || best < first)) continue;
    const bool last = best + 1 == many;
    const int32_t low = bits_of(candidates[best]), high = last ? INFINITE : bits_of(candidates[best + 1]);
    int64_t room = most - (last ? 0 : above[best + 1]), kept = 0;
    for (int64_t i = 0; i < count; i++) {
      const float value = get(values, i);
      const int32_t each = key(value);
      if (each == INFINITE || (each > low && (each > high || room-- > 0))) {
        set(positions, kept, get(positions, i));
        set(values, kept++, value);
      }
    }
    return kept;
  }
} catch (const std::bad_alloc&) {
  return -2;
}

API int64_t grace_finite(const Loops*, const float* const* vectors, const int64_t* counts, int64_t many) {
  for (int64_t v = 0; v < many; v++) {
    int32_t wrong = 0;
    for (int64_t i = 0; i < counts[v]; i++) wrong |= int32_t(key(get(vectors[v], i)) == INFINITE);
    if (wrong) return 0;
  }
  return 1;
}

API void grace_words(const Loops* loops, int64_t key0, int64_t key1, int64_t start, int64_t n, int32_t* out,
                     int64_t threads) {
  split(std::max<int64_t>(n, 0), 4096, threads, [=](int64_t begin, int64_t end, int64_t) {
    loops->words(uint32_t(key0), uint32_t(key1), start + begin, end - begin, out + begin);
  });
}

API int64_t grace_smallest_words(const Loops* loops, int64_t key0, int64_t key1, int64_t start, int64_t n, int64_t k,
                                 int32_t* positions, int64_t threads) try {
  constexpr int64_t TILE = 4096;
  if (n <= 0 || k <= 0) return 0;
  k = std::min(k, n);
  threads = n > ALONE && threads > 1 ? std::min<int64_t>(threads, 64) : 1;
  // A margin for random deviation; if it does not suffice, examine all.
  const double wanted = double(k) + 6 * __builtin_sqrt(double(k)) + 16;
  for (double share = wanted / double(n);; share = 1) {
    const int32_t bound = share < 1 ? int32_t((1 - share) * 2147483647.0) : 0;
    std::vector<Candidates> all(size_t{64});
    bool failed[64] = {};
    split(n, TILE, threads, [&](int64_t begin, int64_t end, int64_t t) {
      int32_t words[TILE];
      Candidates& found = all[size_t(t)];
      for (int64_t i = begin; i < end; i += TILE) {
        const int64_t size = std::min(TILE, end - i);
        if (found.capacity - found.count < TILE + 16 && !found.reserve(2 * found.capacity + 2 * TILE)) {
          failed[t] = true;
          return;
        }
        loops->inverse(uint32_t(key0), uint32_t(key1), start + i, size, words);
        found.count += loops->select(reinterpret_cast<const float*>(words), nullptr, nullptr, size, bound, MAGNITUDE,
                                     found.values + found.count, found.positions + found.count,
                                     found.capacity - found.count, int32_t(i), grace::NONE).count;
      }
    });
    if (std::find(failed, failed + 64, true) != failed + 64) return -2;
    int64_t count = 0;
    for (const auto& each : all) count += each.count;
    if (count < k && share < 1) continue;
    std::vector<int32_t> keys;
    keys.reserve(size_t(count));
    for (const auto& each : all)
      for (int64_t i = 0; i < each.count; i++) keys.push_back(bits_of(each.values[i]));
    std::nth_element(keys.begin(), keys.begin() + (k - 1), keys.end(), std::greater<int32_t>());
    const int32_t last = keys[size_t(k - 1)];
    const bool both = std::find(keys.begin() + k, keys.end(), last) == keys.end();  // all words that are equal in these bits
    const auto word = [&](int32_t position) {
      int32_t found;
      loops->words(uint32_t(key0), uint32_t(key1), start + position, 1, &found);
      return uint32_t(found);
    };
    int64_t written = 0;
    for (const auto& each : all)
      for (int64_t i = 0; i < each.count; i++) {
        const int32_t found = bits_of(each.values[i]);
        // If two words differ only in the last bit and one fits, take the one without it.
        if (found > last || (found == last && (both || !(word(each.positions[i]) & 1))))
          set(positions, written++, each.positions[i]);
      }
    return 0;
  }
} catch (const std::bad_alloc&) {
  return -2;
}

API void grace_correct(const Loops* loops, const float* g, const float* u, const float* v, float* u_out, float* v_out,
                       float* last, float momentum, int64_t nesterov, int64_t n, int64_t threads) {
  const bool stream = streams(g, v, u_out, n) && u_out != u;
  split(std::max<int64_t>(n, 0), 4096, threads, [=](int64_t begin, int64_t end, int64_t) {
    loops->correct(g + begin, u + begin, v + begin, u_out + begin, v_out + begin, at(last, begin), momentum,
                   nesterov != 0, end - begin, stream);
  });
}

API void grace_noise_table(const Loops* loops, int64_t key0, int64_t key1, int64_t n, uint16_t* out, int64_t) {
  loops->noise(uint32_t(key0), uint32_t(key1), std::max<int64_t>(n, 0), out);
}

API void grace_product(const Loops* loops, const float* x, const float* p, const float* q, float* out, int64_t a,
                       int64_t b, int64_t r, int64_t threads) {
  if (a <= 0 || b <= 0) return;
  if (r <= 0) {  // an empty product is 0
    x ? memmove(out, x, size_t(a * b) * sizeof(float)) : memset(out, 0, size_t(a * b) * sizeof(float));
    return;
  }
  split(a * b, b, threads, [=](int64_t begin, int64_t end, int64_t) {
    loops->product(at(x, begin), p + begin / b * r, q, out + begin, (end - begin) / b, b, r);
  });
}

API void grace_part(const Loops* loops, float* x, const float* p, const float* q, const float* taken_p,
                    const float* taken_q, float* rest, int64_t a, int64_t b, int64_t r, int64_t threads) {
  if (a <= 0 || b <= 0 || r <= 0) return;
  const bool stream = b % 4 == 0 && streams(x, nullptr, rest, a * b);  // every row is 16-byte aligned
  split(a * b, b, threads, [=](int64_t begin, int64_t end, int64_t) {
    const int64_t row = begin / b * r;
    loops->part(x + begin, p + row, q, taken_p + row, taken_q, rest + begin, (end - begin) / b, b, r, stream);
  });
}

API void grace_left(const Loops* loops, float* m, const float* residual, const float* q, float* p, int64_t a, int64_t b,
                    int64_t r, int64_t threads) {
  if (a <= 0 || b <= 0 || r <= 0) return;
  split(a * b, 4 * b, threads, [=](int64_t begin, int64_t end, int64_t) {
    loops->left(m + begin, at(residual, begin), q, p + begin / b * r, (end - begin) / b, b, r);
  });
}

API void grace_right(const Loops* loops, float* m, const float* residual, const float* p, float* q, int64_t a, int64_t b,
                     int64_t r, int64_t threads) {
  if (a <= 0 || b <= 0 || r <= 0) return;
  split(a * b, 1024 * a, threads, [=](int64_t begin, int64_t end, int64_t) {
    loops->right(m, residual, p, q, a, b, r, begin / a, end / a);
  });
}

// ---- codes of few bits -------------------------------------------------------------------------------------------------

namespace {

// The largest magnitude, or NaN if any element is NaN.
float largest_of(const Loops* loops, const float* x, const float* residual, int64_t n, int64_t threads) {
  std::vector<int32_t> found(size_t((n + PIECE - 1) / PIECE));
  split(n, PIECE, threads, [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t i = begin; i < end; i += PIECE)
      found[size_t(i / PIECE)] = loops->ints_largest(x + i, at(residual, i), std::min(PIECE, end - i));
  });
  return float_of(*std::max_element(found.begin(), found.end()));
}

// Bytes of n packed codes, n a multiple of 8.
int64_t bytes_of(int64_t n, int bits) { return n / 8 * bits; }

}  // namespace

API void grace_levels_encode(const Loops* loops, const float* x, const float* residual, float* out, uint8_t* codes,
                             float* scales, int64_t n, int64_t block, int64_t bits, int64_t levels,
                             const uint16_t* table, const uint16_t* offsets, int64_t start, int64_t key0, int64_t key1,
                             int64_t threads, int64_t swap) {
  if (n <= 0) return;
  if (block <= 0 || block > n) block = n;
  const Out form = form_of(x, residual, out, n, swap);
  const Levels how = {int(bits), int(levels), {table, offsets, start / 65536, start}, uint32_t(key0), uint32_t(key1)};
  if (block <= PIECE)
    return split(n, block, threads, [=, &how](int64_t begin, int64_t end, int64_t) {
      loops->levels_blocks(x + begin, at(residual, begin), at(out, begin), codes + bytes_of(begin, how.bits),
                           scales + begin / block, end - begin, block, &how, begin, form);
    });
  for (int64_t from = 0, b = 0; from < n; from += block, b++) {
    const int64_t size = std::min(block, n - from);
    const float largest = largest_of(loops, x + from, at(residual, from), size, threads);
    in_pieces(
        size, threads,
        [=](int64_t i, int64_t count) {
          return levels ? loops->squares(x + from + i, at(residual, from + i), count, largest) : 0.0;
        },
        [=](const std::vector<double>& squares) {
          double total = 0;
          for (const double each : squares) total += each;
          const float scale = levels ? largest * __builtin_sqrtf(float(total)) : largest;
          set(scales, b, scale);
          return scale;
        },
        [=, &how](int64_t i, int64_t count, float scale) {
          loops->levels_emit(x + from + i, at(residual, from + i), at(out, from + i),
                             codes + bytes_of(from + i, how.bits), scale, count, &how, from + i, form);
        });
  }
}

API void grace_levels_mean(const Loops* loops, const uint8_t* const* codes, const float* const* scales, int64_t workers,
                           float* out, int64_t n, int64_t block, int64_t bits, int64_t levels, int64_t threads) {
  if (n <= 0) return;
  if (block <= 0 || block > n) block = n;
  const bool stream = streams(nullptr, nullptr, out, n);
  const Levels how = {int(bits), int(levels), {}, 0, 0};
  split(n, block == n ? PIECE : block, threads, [=, &how](int64_t begin, int64_t end, int64_t) {
    loops->levels_sum(codes, scales, workers, out, begin, end, block, &how, stream);
  });
}

API void grace_votes_encode(const Loops* loops, const float* x, uint8_t* bits, uint8_t* flags, int64_t n,
                            int64_t threads) {
  split(std::max<int64_t>(n, 0), 8192, threads, [=](int64_t begin, int64_t end, int64_t) {
    loops->votes_encode(x + begin, bits + begin / 8, flags + begin / 8192, end - begin);
  });
}

API void grace_votes_mean(const Loops* loops, const uint8_t* const* bits, const uint8_t* const* flags, int64_t workers,
                          float* out, int64_t n, int64_t threads) {
  const bool stream = streams(nullptr, nullptr, out, n);
  split(std::max<int64_t>(n, 0), 8192, threads, [=](int64_t begin, int64_t end, int64_t) {
    loops->votes_sum(bits, flags, workers, out, begin, end, stream);
  });
}

API void grace_halves_encode(const Loops* loops, const float* x, const float* residual, float* out, uint8_t* bits,
                             float* means, int64_t n, int64_t block, int64_t threads, int64_t swap) {
  if (n <= 0) return;
  if (block <= 0 || block > n) block = n;
  const Out form = form_of(x, residual, out, n, swap);
  struct Means {
    float below, rest;
  };
  const auto means_of = [](int64_t size, const Halves& all) {
    const int64_t others = size - all.count;
    return Means{float(all.below) / (all.count ? float(all.count) : 1.0f),
                 float(all.rest) / (others ? float(others) : 1.0f)};
  };
  const auto emit = [=](int64_t i, int64_t count, Means each) {
    loops->halves_emit(x + i, at(residual, i), at(out, i), bits + i / 8, each.below, each.rest, count, form);
  };
  if (block <= PIECE)
    return split(n, block, threads, [=](int64_t begin, int64_t end, int64_t) {
      for (int64_t i = begin; i < end; i += block) {
        const int64_t size = std::min(block, end - i);
        const Means each = means_of(size, loops->halves(x + i, at(residual, i), size));
        set(means, 2 * (i / block), each.below), set(means, 2 * (i / block) + 1, each.rest);
        emit(i, size, each);
      }
    });
  for (int64_t from = 0, b = 0; from < n; from += block, b++) {
    const int64_t size = std::min(block, n - from);
    in_pieces(
        size, threads,
        [=](int64_t i, int64_t count) { return loops->halves(x + from + i, at(residual, from + i), count); },
        [=](const std::vector<Halves>& found) {
          Halves all = {0, 0, 0};
          for (const Halves& each : found) all.count += each.count, all.below += each.below, all.rest += each.rest;
          const Means each = means_of(size, all);
          set(means, 2 * b, each.below), set(means, 2 * b + 1, each.rest);
          return each;
        },
        [=](int64_t i, int64_t count, Means each) { emit(from + i, count, each); });
  }
}

API void grace_halves_mean(const Loops* loops, const uint8_t* const* bits, const float* const* means, int64_t workers,
                           float* out, int64_t n, int64_t block, int64_t threads) {
  if (n <= 0) return;
  if (block <= 0 || block > n) block = n;
  const bool stream = streams(nullptr, nullptr, out, n);
  split(n, block == n ? PIECE : block, threads, [=](int64_t begin, int64_t end, int64_t) {
    loops->halves_sum(bits, means, workers, out, begin, end, block, stream);
  });
}

// ---- five trits in a byte, and runs of zeros, as in grace/compressors/threelc.py ---------------------------------------

namespace {

constexpr uint8_t ZEROS = 121;    // byte of five zeros
constexpr int FIRST = 243;        // a byte of at least this is a run of 2 .. 14 bytes of zeros
constexpr int LONGEST = 14;
constexpr int64_t TRITS = 65280;  // elements processed together: whole cache lines and whole bytes

// The number of bytes that a byte expands to.
int64_t length(uint8_t byte) { return std::max<int>(byte, FIRST - 1) - (FIRST - 2); }

// The bytes from an element on; its index is a multiple of 5.
Runs runs_from(const uint8_t* next, int64_t element) {
  int64_t at = 0;
  while (at < element) at += 5 * length(*next++);
  return {next, at - element};
}

// Replaces runs of ZEROS by one byte each, in place. Returns the new number of bytes.
int64_t shorten(uint8_t* bytes, int64_t size) {
  int64_t kept = 0, begin = 0;  // of the run
  const auto end = [&](int64_t stop) {
    int64_t run = stop - begin;
    for (; run > LONGEST; run -= LONGEST) bytes[kept++] = FIRST - 2 + LONGEST;
    bytes[kept] = run > 1 ? uint8_t(FIRST - 2 + run) : ZEROS;
    kept += run > 0;
    begin = stop + 1;
  };
  int64_t i = 0;
  for (; i + 8 <= size; i += 8) {
    const uint64_t low = 0x7f7f7f7f7f7f7f7f, word = get(reinterpret_cast<uint64_t*>(bytes + i), 0) ^ 0x7979797979797979;
    for (uint64_t others = (((word & low) + low) | word) & ~low; others; others &= others - 1) {
      const int64_t at = i + __builtin_ctzll(others) / 8;
      const uint8_t byte = bytes[at];
      end(at);
      bytes[kept++] = byte;
    }
  }
  for (; i < size; i++)
    if (const uint8_t byte = bytes[i]; byte != ZEROS) end(i), bytes[kept++] = byte;
  if (begin < size) end(size);
  return kept;
}

}  // namespace

API int64_t grace_trits_encode(const Loops* loops, const float* x, const float* residual, float* out, uint8_t* bytes,
                               float* scales, int64_t n, int64_t block, float sparsity, int64_t runs, int64_t threads,
                               int64_t swap) {
  if (n <= 0) return 0;
  if (block <= 0 || block > n) block = n;
  const Out form = form_of(x, residual, out, n, swap);
  const auto emit = [=](int64_t i, int64_t count, float scale) {
    loops->trits_emit(x + i, at(residual, i), at(out, i), bytes + i / 5, scale, count, form);
  };
  if (block <= PIECE)
    split(n, block, threads, [=](int64_t begin, int64_t end, int64_t) {
      for (int64_t i = begin; i < end; i += block) {
        const int64_t size = std::min(block, end - i);
        const float scale = float_of(loops->ints_largest(x + i, at(residual, i), size)) * sparsity;
        set(scales, i / block, scale);
        emit(i, size, scale);
      }
    });
  else
    for (int64_t from = 0, b = 0; from < n; from += block, b++) {
      const int64_t size = std::min(block, n - from);
      const float scale = largest_of(loops, x + from, at(residual, from), size, threads) * sparsity;
      set(scales, b, scale);
      split(size, TRITS, threads, [=](int64_t begin, int64_t end, int64_t) {
        for (int64_t i = (end - 1) / TRITS * TRITS; i >= begin; i -= TRITS)  // last first: it may still be cached
          emit(from + i, std::min(TRITS, end - i), scale);
      });
    }
  return runs ? shorten(bytes, (n + 4) / 5) : (n + 4) / 5;
}

API int64_t grace_trits_mean(const Loops* loops, const uint8_t* const* bytes, const float* const* scales,
                             const int64_t* counts, int64_t workers, float* out, int64_t n, int64_t block, int64_t runs,
                             int64_t threads) {
  if (n <= 0) return -1;
  if (block <= 0 || block > n) block = n;
  for (int64_t w = 0; runs && w < workers; w++) {
    int64_t size = 0;
    for (int64_t i = 0; i < counts[w]; i++) size += length(bytes[w][i]);
    if (size != (n + 4) / 5) return w;
  }
  const bool stream = streams(nullptr, nullptr, out, n);
  split(n, block == n ? TRITS : block, threads, [=](int64_t begin, int64_t end, int64_t) {
    std::vector<Runs> from;
    for (int64_t w = 0; w < workers; w++)
      from.push_back(runs ? runs_from(bytes[w], begin) : Runs{bytes[w] + begin / 5, 0});
    loops->trits_sum(from.data(), scales, workers, out, begin, end, block, runs, stream);
  });
  return -1;
}

// ---- minifloats ------------------------------------------------------------------------------------------------------

API void grace_codes_encode(const Loops* loops, const grace::Codec* codec, const float* x, const float* residual,
                            float* out, uint8_t* codes, int32_t* scales, int64_t n, int64_t block, int64_t start,
                            int64_t threads, int64_t swap) {
  if (n <= 0) return;
  if (block <= 0 || block > n) block = n;
  const Out form = form_of(x, residual, out, n, swap);
  const auto emit = [=](int64_t i, int64_t count, int32_t scale) {
    loops->codes_emit(codec, x + i, at(residual, i), at(out, i), codes + i * codec->bits / 8, scale, count, start + i,
                      form);
  };
  const auto largest = [=](int64_t i, int64_t count) {
    return loops->codes_largest(codec, x + i, at(residual, i), codes + i * codec->bits / 8, count, start + i);
  };
  if (!scales)  // no statistics
    return split(n, PIECE, threads, [=](int64_t begin, int64_t end, int64_t) { emit(begin, end - begin, 0); });
  if (block <= PIECE)
    return split(n, block, threads, [=](int64_t begin, int64_t end, int64_t) {
      for (int64_t i = begin; i < end; i += block) {
        const int64_t count = std::min(block, end - i);
        const int32_t scale = loops->codes_scale(codec, largest(i, count));
        set(scales, i / block, scale);
        emit(i, count, scale);
      }
    });
  for (int64_t from = 0, b = 0; from < n; from += block, b++) {
    in_pieces(
        std::min(block, n - from), threads,
        [=](int64_t i, int64_t count) { return largest(from + i, count); },
        [=](const std::vector<int32_t>& found) {
          const int32_t scale = loops->codes_scale(codec, *std::max_element(found.begin(), found.end()));
          set(scales, b, scale);
          return scale;
        },
        [=](int64_t i, int64_t count, int32_t scale) { emit(from + i, count, scale); });
  }
}

API void grace_codes_mean(const Loops* loops, const grace::Codec* codec, const uint8_t* const* codes,
                          const int32_t* const* scales, int64_t workers, float* out, int64_t n, int64_t block,
                          int64_t threads) {
  if (n <= 0) return;
  if (block <= 0 || block > n) block = n;
  const bool stream = streams(nullptr, nullptr, out, n);
  split(n, block == n ? PIECE : block, threads, [=](int64_t begin, int64_t end, int64_t) {
    loops->codes_sum(codec, codes, scales, workers, out, begin, end, block, stream);
  });
}

// ---- randomly rotated blocks -----------------------------------------------------------------------------------------

namespace {

// Scratch for one block, aligned to a cache line.
struct Room {
  std::vector<float> all;
  explicit Room(int64_t width) : all(size_t(5 * std::max<int64_t>(width, 16) + 16)) {}
  float* begin() {
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(all.data()) + 63) & ~uintptr_t(63));
  }
};

}  // namespace

API void grace_normal_encode(const Loops* loops, const float* x, const float* residual, float* out, uint8_t* codes,
                             float* scales, uint8_t* streams, int64_t n, int64_t width, int64_t bits,
                             const float* levels, const float* middles, float divisor, int64_t stream, int64_t key0,
                             int64_t key1, int64_t start, int64_t threads, int64_t swap) {
  if (n <= 0) return;
  const Out form = form_of(x, residual, out, n, swap);
  const Rotation rotation = {width, start, uint32_t(key0), uint32_t(key1)};
  const Normal how = {int(bits), int(stream), divisor, levels, middles};
  memset(streams, int(stream), size_t((n + width - 1) / width));
  split(n, width, threads, [=, &rotation, &how](int64_t begin, int64_t end, int64_t) {
    Room room(width);
    loops->normal_blocks(&rotation, &how, x + begin, at(residual, begin), at(out, begin),
                         codes + bytes_of(begin, how.bits), scales + begin / width, end - begin, begin, room.begin(),
                         form);
  });
}

API void grace_normal_mean(const Loops* loops, const uint8_t* const* codes, const float* const* scales,
                           const uint8_t* const* signs, int64_t workers, float* out, int64_t n, int64_t width,
                           int64_t bits, const float* levels, int64_t key0, int64_t key1, int64_t start,
                           int64_t threads) {
  if (n <= 0) return;
  const bool stream = streams(nullptr, nullptr, out, n);
  const Rotation rotation = {width, start, uint32_t(key0), uint32_t(key1)};
  const Normal how = {int(bits), 0, 0, levels, nullptr};
  split(n, width, threads, [=, &rotation, &how](int64_t begin, int64_t end, int64_t) {
    Room room(width);
    loops->normal_sum(&rotation, &how, codes, scales, signs, workers, out, begin, end, room.begin(), stream);
  });
}

API void grace_norms(const Loops* loops, const float* x, float* norms, int64_t n, int64_t block, int64_t threads) {
  if (n <= 0) return;
  split(n, block, threads, [=](int64_t begin, int64_t end, int64_t) {
    for (int64_t i = begin; i < end; i += block) {
      const int64_t size = std::min(block, end - i);
      const float largest = float_of(loops->ints_largest(x + i, nullptr, size));
      set(norms, i / block, largest * __builtin_sqrtf(float(loops->squares(x + i, nullptr, size, largest))));
    }
  });
}

API void grace_steps_encode(const Loops* loops, const float* x, const float* norms, uint8_t* codes, int64_t n,
                            int64_t width, int64_t top, int64_t wide, float cut, float factor, const uint16_t* table,
                            const uint16_t* offsets, int64_t key0, int64_t key1, int64_t start, int64_t threads) {
  if (n <= 0) return;
  const Rotation rotation = {width, start, uint32_t(key0), uint32_t(key1)};
  const Steps how = {int(top), int(wide), cut, factor, 0, {table, offsets, start / 65536, start}};
  split(n, width, threads, [=, &rotation, &how](int64_t begin, int64_t end, int64_t) {
    Room room(width);
    loops->steps_blocks(&rotation, &how, x + begin, norms + begin / width, codes + begin * (wide ? 4 : 1), end - begin,
                        begin, room.begin());
  });
}

API void grace_steps_values(const Loops* loops, const uint8_t* sums, const uint8_t* own, const float* norms,
                            const float* x, float* mean, float* rest, int64_t n, int64_t width, int64_t wide, float cut,
                            float factor, float own_factor, int64_t key0, int64_t key1, int64_t start,
                            int64_t threads) {
  if (n <= 0) return;
  const bool stream = streams(x, nullptr, own ? rest : mean, n);
  const Rotation rotation = {width, start, uint32_t(key0), uint32_t(key1)};
  const Steps how = {0, int(wide), cut, factor, own_factor, {}};
  split(n, width, threads, [=, &rotation, &how](int64_t begin, int64_t end, int64_t) {
    Room room(width);
    const int64_t size = wide ? 4 : 1;
    loops->steps_values(&rotation, &how, at(sums, begin * size), at(own, begin * size), norms + begin / width,
                        at(x, begin), at(mean, begin), at(rest, begin), end - begin, begin, room.begin(), stream);
  });
}

// ---- single methods --------------------------------------------------------------------------------------------------

#include "methods.cc"
