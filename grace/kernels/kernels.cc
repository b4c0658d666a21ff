// The C interface (api.h): splits work over threads and blocks, and handles single elements. The loops are compiled
// from loops.cc into one library per instruction set.
//
// Results do not depend on the number of threads. Only these depend on the instruction set: the bits of NaN, and the
// last bits of lowrank_left, lowrank_right and demo's cosine coefficients.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#ifdef __x86_64__
#include <cpuid.h>
#endif

#include "api.h"
#include "interface-inl.h"
#include "interface-methods-inl.h"
#include "kernels.h"

using grace::Eden;
using grace::Halves;
using grace::Noise;
using grace::Qsgd;
using grace::Rotation;
using grace::Runs;
using grace::Thc;

// Executes CPUID directly, because __builtin_cpu_supports finds nothing in libraries that Zig has linked.
API int64_t grace_supports(const char* isa) {
#if defined(__x86_64__)
  unsigned a, b, c, d, system, upper;
  if (__get_cpuid(1, &a, &b, &c, &d) && (c & bit_OSXSAVE)) {
    const bool fma = (c & bit_FMA) && (c & bit_POPCNT);
    __asm__("xgetbv" : "=a"(system), "=d"(upper) : "c"(0));  // which registers the operating system saves
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

// For tests: sets the smallest number of elements that are written with streaming stores. Returns the old number.
API int64_t grace_stream_from(int64_t n) {
  std::swap(n, streamed);
  return n;
}

API int64_t grace_gathered(const Loops*, int64_t n) {
  std::swap(n, gathered);
  return n;
}

API const char* grace_name(const Loops* loops) { return loops->name; }

API void grace_efsignsgd_encode(const Loops* loops, const float* x, const float* residual, float* out, uint8_t* bits,
                                float* scales, int64_t n, int64_t block, int64_t threads, int64_t swap) {
  if (n <= 0) return;
  if (block <= 0 || block > n) block = n;
  const Out form = form_of(x, residual, out, n, swap);
  if (block <= PIECE)
    return split(n, block, threads, [=](int64_t begin, int64_t end, int64_t) {
      loops->efsignsgd_blocks(x + begin, at(residual, begin), at(out, begin), bits + begin / 8, scales + begin / block,
                              end - begin, block, form);
    });
  for (int64_t start = 0, b = 0; start < n; start += block, b++) {
    const int64_t size = std::min(block, n - start);
    in_pieces(
        size, threads,
        [=](int64_t i, int64_t count) { return loops->efsignsgd_total(x + start + i, at(residual, start + i), count); },
        [=](const std::vector<double>& totals) {
          double total = 0;
          for (const double each : totals) total += each;
          const float scale = float(total) / float(size);
          set(scales, b, scale);
          return scale;
        },
        [=](int64_t i, int64_t count, float scale) {
          loops->efsignsgd_emit(x + start + i, at(residual, start + i), at(out, start + i), bits + (start + i) / 8, scale,
                                count, form);
        });
  }
}

API void grace_efsignsgd_mean(const Loops* loops, const uint8_t* const* bits, const float* const* scales, int64_t workers,
                              float* out, int64_t n, int64_t block, int64_t threads) {
  if (n <= 0) return;
  if (block <= 0 || block > n) block = n;
  const bool stream = streams(nullptr, nullptr, out, n);
  split(n, block == n ? PIECE : block, threads, [=](int64_t begin, int64_t end, int64_t) {
    loops->efsignsgd_sum(bits, scales, workers, out, begin, end, block, stream);
  });
}

API void grace_blockint_encode(const Loops* loops, const float* x, const float* residual, float* out, uint8_t* codes,
                               float* scales, int64_t n, int64_t block, int64_t bits, const uint16_t* table,
                               const uint16_t* offsets, int64_t start, int64_t threads, int64_t swap) {
  if (n <= 0) return;
  if (block <= 0 || block > n) block = n;
  const Out form = form_of(x, residual, out, n, swap);
  const Noise noise = {table, offsets, start / 65536, start};
  const int width = int(bits);
  if (block <= PIECE)
    return split(n, block, threads, [=](int64_t begin, int64_t end, int64_t) {
      loops->blockint_blocks(x + begin, at(residual, begin), at(out, begin), codes + begin * width / 8,
                             scales + begin / block, end - begin, block, width, &noise, begin, form);
    });
  for (int64_t from = 0, b = 0; from < n; from += block, b++) {
    in_pieces(
        std::min(block, n - from), threads,
        [=](int64_t i, int64_t count) { return loops->largest_magnitude(x + from + i, at(residual, from + i), count); },
        [=](const std::vector<int32_t>& largest) {
          const float scale = float_of(*std::max_element(largest.begin(), largest.end()));
          set(scales, b, scale);
          return scale;
        },
        [=](int64_t i, int64_t count, float scale) {
          loops->blockint_emit(x + from + i, at(residual, from + i), at(out, from + i), codes + (from + i) * width / 8,
                               scale, count, width, &noise, from + i, form);
        });
  }
}

API void grace_blockint_mean(const Loops* loops, const uint8_t* const* codes, const float* const* scales, int64_t workers,
                             float* out, int64_t n, int64_t block, int64_t bits, int64_t threads) {
  if (n <= 0) return;
  if (block <= 0 || block > n) block = n;
  const bool stream = streams(nullptr, nullptr, out, n);
  split(n, block == n ? PIECE : block, threads, [=](int64_t begin, int64_t end, int64_t) {
    loops->blockint_sum(codes, scales, workers, out, begin, end, block, int(bits), stream);
  });
}

// ---- the largest elements: topk, chunktopk --------------------------------------------------------------------------

API int64_t grace_topk_encode(const Loops* loops, const float* x, const float* residual, float* out, float* values,
                              int32_t* positions, int64_t n, int64_t k, int64_t threads, int64_t swap) {
  if (n <= 0) return 0;
  k = std::clamp<int64_t>(k, 0, n);
  Out form = form_of(x, residual, out, n, swap);
  threads = n > ALONE && threads > 1 ? std::min<int64_t>(threads, 64) : 1;
  static thread_local Candidates kept_scratch;
  const bool swapped = form == grace::SWAPPED;
  const float* const spent = x;
  int64_t begun[64] = {}, reached[64] = {};  // range of elements that each thread has swapped in its first pass
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
      // Too few candidates: write them back. From now on, out holds x + residual.
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

// ---- elements above a bound: threshold, sidco -----------------------------------------------------------------------

namespace {

// Selects the elements of begin .. end whose magnitude bits reach `bound`. Writes the first `capacity` of them to
// values and positions, and the others back to out. Returns their total number.
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

// Selects the elements whose magnitude bits reach `least`, as grace_threshold_encode.
int64_t reaching(const Loops* loops, const float* x, const float* residual, float* out, int32_t least, float* values,
                 int32_t* positions, int64_t capacity, int64_t n, int64_t threads) {
  if (n <= 0) return 0;
  const Out form = form_of(x, residual, out, n);
  if (threads > 1 && n > ALONE && capacity >= 4096) {  // each thread fills an equal share of the arrays
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
    if (out) x = out, residual = nullptr;  // the total fits, but one share does not: repeat with one thread
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
  const int32_t least = bound > 0 ? bits_of(bound) + 1 : bound == 0 ? 1 : 0;  // with a NaN bound, all elements
  return reaching(loops, x, nullptr, nullptr, least, values, positions, capacity, n, threads);
}

// ---- sparse means: topk, threshold, cltk, adaq ----------------------------------------------------------------------

namespace {

// Average: out = the mean of sparse vectors. SIGNED: payloads of adaq, which have two values each; a position p < 0
// stands for position -1 - p with the second value.
template <bool SIGNED>
int64_t mean_of_sparse(const Loops* loops, const float* const* values, const int32_t* const* positions,
                       const int64_t* counts, int64_t workers, float* out, int64_t n, int64_t threads) try {
  constexpr int64_t TILE = 4096;
  const bool stream = streams(nullptr, nullptr, out, n);
  threads = n > ALONE && threads > 1 ? std::min<int64_t>(threads, 64) : 1;
  const auto position = [=](int64_t w, int64_t i) {  // invalid negative positions become huge
    const int32_t sent = get(positions[w], i);
    return uint32_t(SIGNED && sent < 0 ? ~sent : sent);
  };
  if (n <= 0) {
    for (int64_t w = 0; w < workers; w++)
      if (counts[w] > 0) return w;
    return -1;
  }
  const int64_t tiles = (n + TILE - 1) / TILE;
  threads = std::min(threads, tiles);
  std::vector<int64_t> cuts(size_t((threads + 1) * workers));  // where each thread's part of the positions begins
  for (int64_t t = 0; t <= threads; t++) {
    for (int64_t w = 0; w < workers; w++) {
      int64_t low = t == threads ? counts[w] : 0, high = t == 0 ? 0 : counts[w];
      const int64_t bound = tiles * t / threads * TILE;
      while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (int64_t(position(w, middle)) < bound)
          low = middle + 1;
        else
          high = middle;
      }
      cuts[size_t(t * workers + w)] = low;
    }
  }
  std::vector<int64_t> reached = cuts;
  split(n, TILE, threads, [&](int64_t begin, int64_t end, int64_t t) {
    alignas(64) float tile[TILE];
    int64_t* next = &reached[size_t(t * workers)];
    for (int64_t from = begin; from < end; from += TILE) {
      const int64_t size = std::min(TILE, end - from);
      memset(tile, 0, size_t(size) * 4);
      for (int64_t w = 0; w < workers; w++) {
        const float both[2] = {SIGNED ? get(values[w], 0) : 0.0f, SIGNED ? get(values[w], 1) : 0.0f};
        int64_t i = next[w], previous = -1;
        for (const int64_t count = counts[w]; i < count; i++) {
          const int32_t sent = get(positions[w], i), negative = SIGNED && sent < 0;
          const int64_t j = int64_t(uint32_t(sent ^ -negative)) - from;
          if (j >= size || j <= previous) break;  // in a later tile; or not ascending, which the check below finds
          tile[j] += SIGNED ? both[negative] : get(values[w], i);
          previous = j;
        }
        next[w] = i;
      }
      loops->divide(tile, out + from, size, workers, stream);
    }
  });
  for (int64_t w = 0; w < workers; w++)
    for (int64_t t = 0; t < threads; t++)
      if (reached[size_t(t * workers + w)] != cuts[size_t((t + 1) * workers + w)]) return w;
  return -1;
} catch (const std::bad_alloc&) {
  return -2;
}

}  // namespace

API int64_t grace_sparse_mean(const Loops* loops, const float* const* values, const int32_t* const* positions,
                              const int64_t* counts, int64_t workers, float* out, int64_t n, int64_t threads) {
  return mean_of_sparse<false>(loops, values, positions, counts, workers, out, n, threads);
}

API int64_t grace_adaq_mean(const Loops* loops, const float* const* values, const int32_t* const* positions,
                            const int64_t* counts, int64_t workers, float* out, int64_t n, int64_t threads) {
  return mean_of_sparse<true>(loops, values, positions, counts, workers, out, n, threads);
}

// ---- a threshold from a sample: dgc, topk ---------------------------------------------------------------------------

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
    // Returns the number of candidate bounds below an element, or 0 for a non-finite element.
    const auto below = [&](float value) {
      const int32_t each = key(value);
      if (each == INFINITE) return int64_t{0};
      return std::lower_bound(candidates + first, candidates + many, float_of(each)) - candidates;
    };
    int64_t above[MANY + 1] = {};
    for (int64_t i = 0; i < count; i++) above[below(get(values, i))]++;
    for (int64_t j = many, sum = 0; j >= 0; j--) {  // convert counts between bounds to counts above each bound
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
  // Look only at words below a bound, chosen so that somewhat more than k words are expected below it. If fewer than k
  // words are below it, look at all words.
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
    const bool both = std::find(keys.begin() + k, keys.end(), last) == keys.end();  // all words with these bits fit
    const auto word = [&](int32_t position) {
      int32_t found;
      loops->words(uint32_t(key0), uint32_t(key1), start + position, 1, &found);
      return uint32_t(found);
    };
    int64_t written = 0;
    for (const auto& each : all)
      for (int64_t i = 0; i < each.count; i++) {
        const int32_t found = bits_of(each.values[i]);
        // Keys lack the lowest bit of the words. If two words differ only there and one fits, take the smaller one.
        if (found > last || (found == last && (both || !(word(each.positions[i]) & 1))))
          set(positions, written++, each.positions[i]);
      }
    return 0;
  }
} catch (const std::bad_alloc&) {
  return -2;
}

API void grace_noise_table(const Loops* loops, int64_t key0, int64_t key1, int64_t n, uint16_t* out) {
  loops->noise(uint32_t(key0), uint32_t(key1), std::max<int64_t>(n, 0), out);
}

API void grace_stream_keys(const Loops*, const int64_t* stems, int64_t n, int64_t step, int64_t worker, int64_t* key0,
                           int64_t* key1) {
  const uint32_t first = mixed(uint32_t(step)), second = mixed(uint32_t(worker));
  for (int64_t i = 0; i < n; i++) {
    const uint32_t h = mixed(mixed(uint32_t(stems[i]) + first) + second);
    key0[i] = mixed(h + mixed(1)), key1[i] = mixed(h + mixed(2));
  }
}

API void grace_lowrank_product(const Loops* loops, const float* x, const float* p, const float* q, float* out, int64_t a,
                               int64_t b, int64_t r, int64_t threads) {
  if (a <= 0 || b <= 0) return;
  if (r <= 0) {  // an empty product is 0
    x ? memmove(out, x, size_t(a * b) * sizeof(float)) : memset(out, 0, size_t(a * b) * sizeof(float));
    return;
  }
  split(a * b, b, threads, [=](int64_t begin, int64_t end, int64_t) {
    loops->lowrank_product(at(x, begin), p + begin / b * r, q, out + begin, (end - begin) / b, b, r);
  });
}

API void grace_lowrank_part(const Loops* loops, float* x, const float* p, const float* q, float* rest, int64_t a,
                            int64_t b, int64_t r, int64_t threads) {
  if (a <= 0 || b <= 0 || r <= 0) return;
  const bool stream = b % 4 == 0 && streams(x, nullptr, rest, a * b);  // only if every row is aligned to 16 bytes
  split(a * b, b, threads, [=](int64_t begin, int64_t end, int64_t) {
    loops->lowrank_part(x + begin, p + begin / b * r, q, rest + begin, (end - begin) / b, b, r, stream);
  });
}

API void grace_lowrank_left(const Loops* loops, float* m, const float* residual, const float* q, float* p, int64_t a,
                            int64_t b, int64_t r, int64_t threads) {
  if (a <= 0 || b <= 0 || r <= 0) return;
  split(a * b, 4 * b, threads, [=](int64_t begin, int64_t end, int64_t) {
    loops->lowrank_left(m + begin, at(residual, begin), q, p + begin / b * r, (end - begin) / b, b, r);
  });
}

API void grace_lowrank_right(const Loops* loops, const float* m, const float* p, float* q, int64_t a, int64_t b, int64_t r,
                             int64_t threads) {
  if (a <= 0 || b <= 0 || r <= 0) return;
  split(a * b, 1024 * a, threads, [=](int64_t begin, int64_t end, int64_t) {
    loops->lowrank_right(m, p, q, a, b, r, begin / a, end / a);
  });
}

// ---- codes of few bits: qsgd, terngrad, signsgd, signum, onebit -----------------------------------------------------

API void grace_qsgd_encode(const Loops* loops, const float* x, const float* residual, float* out, uint8_t* codes,
                           float* scales, int64_t n, int64_t block, int64_t bits, int64_t levels,
                           const uint16_t* table, const uint16_t* offsets, int64_t start, int64_t key0, int64_t key1,
                           int64_t threads, int64_t swap) {
  if (n <= 0) return;
  if (block <= 0 || block > n) block = n;
  const Out form = form_of(x, residual, out, n, swap);
  const Qsgd how = {int(bits), int(levels), {table, offsets, start / 65536, start}, uint32_t(key0), uint32_t(key1)};
  if (block <= PIECE)
    return split(n, block, threads, [=, &how](int64_t begin, int64_t end, int64_t) {
      loops->qsgd_blocks(x + begin, at(residual, begin), at(out, begin), codes + bytes_of(begin, how.bits),
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
          loops->qsgd_emit(x + from + i, at(residual, from + i), at(out, from + i),
                           codes + bytes_of(from + i, how.bits), scale, count, &how, from + i, form);
        });
  }
}

API void grace_qsgd_mean(const Loops* loops, const uint8_t* const* codes, const float* const* scales, int64_t workers,
                         float* out, int64_t n, int64_t block, int64_t bits, int64_t levels, int64_t threads) {
  if (n <= 0) return;
  if (block <= 0 || block > n) block = n;
  const bool stream = streams(nullptr, nullptr, out, n);
  const Qsgd how = {int(bits), int(levels), {}, 0, 0};
  split(n, block == n ? PIECE : block, threads, [=, &how](int64_t begin, int64_t end, int64_t) {
    loops->qsgd_sum(codes, scales, workers, out, begin, end, block, &how, stream);
  });
}

API void grace_signsgd_encode(const Loops* loops, const float* x, uint8_t* bits, uint8_t* flags, int64_t n,
                              int64_t threads) {
  split(std::max<int64_t>(n, 0), 8192, threads, [=](int64_t begin, int64_t end, int64_t) {
    loops->signsgd_encode(x + begin, bits + begin / 8, flags + begin / 8192, end - begin);
  });
}

API void grace_signsgd_mean(const Loops* loops, const uint8_t* const* bits, const uint8_t* const* flags, int64_t workers,
                            float* out, int64_t n, int64_t threads) {
  const bool stream = streams(nullptr, nullptr, out, n);
  split(std::max<int64_t>(n, 0), 8192, threads, [=](int64_t begin, int64_t end, int64_t) {
    loops->signsgd_sum(bits, flags, workers, out, begin, end, stream);
  });
}

API void grace_onebit_encode(const Loops* loops, const float* x, const float* residual, float* out, uint8_t* bits,
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
    loops->onebit_emit(x + i, at(residual, i), at(out, i), bits + i / 8, each.below, each.rest, count, form);
  };
  if (block <= PIECE)
    return split(n, block, threads, [=](int64_t begin, int64_t end, int64_t) {
      for (int64_t i = begin; i < end; i += block) {
        const int64_t size = std::min(block, end - i);
        const Means each = means_of(size, loops->onebit_halves(x + i, at(residual, i), size));
        set(means, 2 * (i / block), each.below), set(means, 2 * (i / block) + 1, each.rest);
        emit(i, size, each);
      }
    });
  for (int64_t from = 0, b = 0; from < n; from += block, b++) {
    const int64_t size = std::min(block, n - from);
    in_pieces(
        size, threads,
        [=](int64_t i, int64_t count) { return loops->onebit_halves(x + from + i, at(residual, from + i), count); },
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

API void grace_onebit_mean(const Loops* loops, const uint8_t* const* bits, const float* const* means, int64_t workers,
                           float* out, int64_t n, int64_t block, int64_t threads) {
  if (n <= 0) return;
  if (block <= 0 || block > n) block = n;
  const bool stream = streams(nullptr, nullptr, out, n);
  split(n, block == n ? PIECE : block, threads, [=](int64_t begin, int64_t end, int64_t) {
    loops->onebit_sum(bits, means, workers, out, begin, end, block, stream);
  });
}

// ---- five trits in a byte, and runs of zeros: threelc ---------------------------------------------------------------

namespace {

constexpr uint8_t ZEROS = 121;    // a byte that stands for five zeros
constexpr int FIRST = 243;        // bytes 243 .. 255 stand for runs of 2 .. 14 such bytes
constexpr int LONGEST = 14;
constexpr int64_t TRITS = 65280;  // elements of a piece: whole cache lines and whole bytes

// Returns the number of bytes of trits that a byte stands for.
int64_t length(uint8_t byte) { return std::max<int>(byte, FIRST - 1) - (FIRST - 2); }

// Returns the position in the bytes where an element, a multiple of 5, is decoded.
Runs runs_from(const uint8_t* next, int64_t element) {
  int64_t at = 0;
  while (at < element) at += 5 * length(*next++);
  return {next, at - element};
}

// Replaces each run of 2 .. 14 adjacent bytes ZEROS by one byte, in place. Returns the new number of bytes.
int64_t shorten(uint8_t* bytes, int64_t size) {
  int64_t kept = 0, begin = 0;  // where the current run begins
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

API int64_t grace_threelc_encode(const Loops* loops, const float* x, const float* residual, float* out, uint8_t* bytes,
                                 float* scales, int64_t n, int64_t block, float sparsity, int64_t runs,
                                 int64_t threads) {
  if (n <= 0) return 0;
  if (block <= 0 || block > n) block = n;
  const auto emit = [=](int64_t i, int64_t count, float scale) {
    loops->threelc_emit(x + i, at(residual, i), at(out, i), bytes + i / 5, scale, count);
  };
  if (block <= PIECE)
    split(n, block, threads, [=](int64_t begin, int64_t end, int64_t) {
      for (int64_t i = begin; i < end; i += block) {
        const int64_t size = std::min(block, end - i);
        const float scale = float_of(loops->largest_magnitude(x + i, at(residual, i), size)) * sparsity;
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
        for (int64_t i = (end - 1) / TRITS * TRITS; i >= begin; i -= TRITS)  // the last piece first: it may still be cached
          emit(from + i, std::min(TRITS, end - i), scale);
      });
    }
  return runs ? shorten(bytes, (n + 4) / 5) : (n + 4) / 5;
}

API int64_t grace_threelc_mean(const Loops* loops, const uint8_t* const* bytes, const float* const* scales,
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
    loops->threelc_sum(from.data(), scales, workers, out, begin, end, block, runs, stream);
  });
  return -1;
}

// ---- codes with a table or a formula: bf16, fp8, natural, natural_dithering, dettmers8 ------------------------------

API void grace_codes_encode(const Loops* loops, const grace::Codec* codec, const float* x, const float* residual,
                            float* out, uint8_t* codes, int32_t* scales, int64_t n, int64_t block, int64_t start,
                            int64_t threads) {
  if (n <= 0) return;
  if (block <= 0 || block > n) block = n;
  const auto emit = [=](int64_t i, int64_t count, int32_t scale) {
    loops->codes_emit(codec, x + i, at(residual, i), at(out, i), codes + i * codec->bits / 8, scale, count, start + i);
  };
  const auto largest = [=](int64_t i, int64_t count) {
    return loops->codes_largest(codec, x + i, at(residual, i), codes + i * codec->bits / 8, count, start + i);
  };
  if (!scales)  // codes without scales need no statistics
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

// ---- randomly rotated blocks: eden, thc -----------------------------------------------------------------------------

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

API void grace_eden_encode(const Loops* loops, const float* x, const float* residual, float* out, uint8_t* codes,
                           float* scales, uint8_t* streams, int64_t n, int64_t width, int64_t bits,
                           const float* levels, const float* middles, float divisor, int64_t stream, int64_t key0,
                           int64_t key1, int64_t start, int64_t threads, int64_t swap) {
  if (n <= 0) return;
  const Out form = form_of(x, residual, out, n, swap);
  const Rotation rotation = {width, start, uint32_t(key0), uint32_t(key1)};
  const Eden how = {int(bits), int(stream), divisor, levels, middles};
  memset(streams, int(stream), size_t((n + width - 1) / width));
  split(n, width, threads, [=, &rotation, &how](int64_t begin, int64_t end, int64_t) {
    Room room(width);
    loops->eden_blocks(&rotation, &how, x + begin, at(residual, begin), at(out, begin),
                       codes + bytes_of(begin, how.bits), scales + begin / width, end - begin, begin, room.begin(),
                       form);
  });
}

API void grace_eden_mean(const Loops* loops, const uint8_t* const* codes, const float* const* scales,
                         const uint8_t* const* signs, int64_t workers, float* out, int64_t n, int64_t width,
                         int64_t bits, const float* levels, int64_t key0, int64_t key1, int64_t start,
                         int64_t threads) {
  if (n <= 0) return;
  const bool stream = streams(nullptr, nullptr, out, n);
  const Rotation rotation = {width, start, uint32_t(key0), uint32_t(key1)};
  const Eden how = {int(bits), 0, 0, levels, nullptr};
  split(n, width, threads, [=, &rotation, &how](int64_t begin, int64_t end, int64_t) {
    Room room(width);
    loops->eden_sum(&rotation, &how, codes, scales, signs, workers, out, begin, end, room.begin(), stream);
  });
}

API void grace_thc_norms(const Loops* loops, const float* x, float* norms, int64_t n, int64_t block, int64_t threads) {
  if (n <= 0) return;
  split(n, block, threads, [=](int64_t begin, int64_t end, int64_t) {
    for (int64_t i = begin; i < end; i += block) {
      const int64_t size = std::min(block, end - i);
      const float largest = float_of(loops->largest_magnitude(x + i, nullptr, size));
      set(norms, i / block, largest * __builtin_sqrtf(float(loops->squares(x + i, nullptr, size, largest))));
    }
  });
}

API void grace_thc_encode(const Loops* loops, const float* x, const float* norms, uint8_t* codes, int64_t n,
                          int64_t width, int64_t top, int64_t wide, float cut, float factor, const uint16_t* table,
                          const uint16_t* offsets, int64_t key0, int64_t key1, int64_t start, int64_t threads) {
  if (n <= 0) return;
  const Rotation rotation = {width, start, uint32_t(key0), uint32_t(key1)};
  const Thc how = {int(top), int(wide), cut, factor, {table, offsets, start / 65536, start}};
  split(n, width, threads, [=, &rotation, &how](int64_t begin, int64_t end, int64_t) {
    Room room(width);
    loops->thc_blocks(&rotation, &how, x + begin, norms + begin / width, codes + begin * (wide ? 4 : 1), end - begin,
                      begin, room.begin());
  });
}

API void grace_thc_values(const Loops* loops, const float* x, const uint8_t* codes, const float* norms, float* out,
                          int64_t n, int64_t width, int64_t wide, float cut, float factor, int64_t key0, int64_t key1,
                          int64_t start, int64_t threads) {
  if (n <= 0) return;
  const bool stream = streams(x, nullptr, out, n);
  const Rotation rotation = {width, start, uint32_t(key0), uint32_t(key1)};
  const Thc how = {0, int(wide), cut, factor, {}};
  split(n, width, threads, [=, &rotation, &how](int64_t begin, int64_t end, int64_t) {
    Room room(width);
    loops->thc_values(&rotation, &how, at(x, begin), codes + begin * (wide ? 4 : 1), norms + begin / width, out + begin,
                      end - begin, begin, room.begin(), stream);
  });
}

// ---- rows of arguments ----------------------------------------------------------------------------------------------

namespace {

// Returns the argument in the lower bytes of a word.
template <class T>
T argument(const int64_t* word) {
  T value;
  memcpy(&value, word, sizeof(T));
  return value;
}

template <class... Arguments, size_t... I>
int64_t call(void (*kernel)(const Loops*, Arguments...), const Loops* loops, const int64_t* words,
             std::index_sequence<I...>) {
  kernel(loops, argument<Arguments>(words + I)...);
  return -1;
}

template <class... Arguments, size_t... I>
int64_t call(int64_t (*kernel)(const Loops*, Arguments...), const Loops* loops, const int64_t* words,
             std::index_sequence<I...>) {
  return kernel(loops, argument<Arguments>(words + I)...);
}

template <class Result, class... Arguments>
constexpr int64_t width_of(Result (*)(const Loops*, Arguments...)) {
  return sizeof...(Arguments);
}

template <auto kernel>
int64_t row(const Loops* loops, const int64_t* words) {
  return call(kernel, loops, words, std::make_index_sequence<size_t(width_of(kernel))>());
}

struct Row {
  int64_t width;
  int64_t (*call)(const Loops* loops, const int64_t* words);
};

constexpr Row ROWS[] = {
#define GRACE_ROW(name) {width_of(grace_##name), row<grace_##name>},
    GRACE_KERNELS(GRACE_ROW)
#undef GRACE_ROW
};

}  // namespace

API int64_t grace_rows(const Loops* loops, int64_t kernel, const int64_t* words, int64_t width, int64_t many,
                       int64_t* results, int64_t threads) {
  if (kernel < 0 || kernel >= int64_t(sizeof(ROWS) / sizeof(Row)) || ROWS[kernel].width != width) return -3;
  const auto work = [=, total = gathered](std::atomic<int64_t>* next) {
    const int64_t before = gathered;
    gathered = total;
    for (int64_t i = (*next)++; i < many; i = (*next)++) results[i] = ROWS[kernel].call(loops, words + i * width);
    gathered = before;
  };
  std::atomic<int64_t> next{0};
  std::vector<std::thread> others;
  for (int64_t t = 1; t < std::min(threads, many); t++) {
    try {
      others.emplace_back(work, &next);
    } catch (const std::system_error&) {  // cannot start a thread
      break;
    }
  }
  work(&next);
  for (auto& other : others) other.join();
  return 0;
}
