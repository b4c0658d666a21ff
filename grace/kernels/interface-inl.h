// Helpers of the C interface: threads, unaligned access, large blocks in pieces, and the search for large elements.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels.h"

namespace {

using grace::Found;
using grace::Loops;
using grace::Out;

constexpr int64_t PIECE = 65536;          // elements of a piece of a large block
constexpr int64_t ALONE = 262144;         // up to this many elements, one thread is fastest
int64_t streamed = int64_t(4) << 20;      // results of at least this many elements exceed the caches
thread_local int64_t gathered = 0;        // total elements of the results that grace_gathered announced
constexpr int64_t SMALL = 16384;          // below this many elements, streaming stores do not pay
constexpr int32_t INFINITE = 0x7f800000;  // the bits of infinity
constexpr int32_t MAGNITUDE = 0x7fffffff;

// Splits 0 .. n into one part per thread and calls work(begin, end, thread) for each. Parts begin at multiples of
// `unit`.
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

// A hash of 32 bits: grace.core.rng.mix.
uint32_t mixed(uint32_t h) {
  h ^= h >> 16;
  h *= 0x85ebca6b;
  h ^= h >> 13;
  h *= 0xc2b2ae35;
  return h ^ (h >> 16);
}

int32_t key(float x) { return std::min(bits_of(x) & MAGNITUDE, INFINITE); }

// Returns whether to write `out` with streaming stores: if `out`, or the total that grace_gathered announced, exceeds
// the caches; if the loop does not read `out`; and if `out` is aligned to 16 bytes.
bool streams(const float* x, const float* residual, const float* out, int64_t n) {
  const bool many = n >= streamed || (n >= SMALL && gathered >= streamed);
  return many && out && out != x && out != residual && reinterpret_cast<uintptr_t>(out) % 16 == 0;
}

// Returns how the loops write the new residual. swap: whether out aliases residual; the old residual then moves to x.
Out form_of(const float* x, const float* residual, const float* out, int64_t n, int64_t swap = 0) {
  if (!out) return grace::NONE;
  if (swap && residual) return grace::SWAPPED;
  return streams(x, residual, out, n) ? grace::STREAMED : grace::KEPT;
}

// Encodes a large block in pieces. First calls statistic(begin, size) for each piece, then scale(statistics), then
// emit(begin, size, scale) for each piece. Emits the last piece first because it may still be cached.
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

// ---- the largest elements -------------------------------------------------------------------------------------------

// Candidates in ascending order of position. Not a std::vector, because that would zero new elements.
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

constexpr int64_t MOST_KEPT = int64_t(4) << 20;  // a thread keeps memory for at most this many candidates between calls

// Returns the k-th largest key of the candidates, 1 <= k <= count. Counts keys in bins, then repeats this inside
// the bin that holds the k-th largest key, until the range is a single key value.
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

// Keeps the k largest candidates; among ties, those at lower positions. If out is not null, writes the other candidates
// back to it. Returns the smallest key that was kept.
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

// Collects candidates: the elements of begin .. end with key >= bound. If there are too many, keeps the k largest. out,
// if written, receives x + residual, with zeros at the candidates' positions. expected: an estimate of the number of
// candidates. Sets reached = the end of the elements read so far. Returns false if memory runs out.
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
    } else {  // among ties the first element wins, so later ones must exceed the smallest candidate
      bound = keep_largest(loops, all, k, out) + 1;
    }
  }
  return true;
}

// Returns the keys of a stratified sample of x + residual.
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

// Returns the largest magnitude, or NaN if any element is NaN.
float largest_of(const Loops* loops, const float* x, const float* residual, int64_t n, int64_t threads) {
  std::vector<int32_t> found(size_t((n + PIECE - 1) / PIECE));
  split(n, PIECE, threads, [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t i = begin; i < end; i += PIECE)
      found[size_t(i / PIECE)] = loops->largest_magnitude(x + i, at(residual, i), std::min(PIECE, end - i));
  });
  return float_of(*std::max_element(found.begin(), found.end()));
}

// Returns the number of bytes of n packed codes; n is a multiple of 8.
int64_t bytes_of(int64_t n, int bits) { return n / 8 * bits; }

}  // namespace
