// The C interface of the loops of single methods (methods-inl.h, cosines-inl.h): functions that kernels.cc exports.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <new>
#include <type_traits>
#include <vector>

#include "api.h"
#include "interface-inl.h"
#include "kernels.h"

using grace::Cosines;
using grace::Inceptionn;
using grace::Noise;
using grace::Streams;
using grace::Terms;
using grace::Tile;

namespace {

constexpr int64_t BINS = 65536;    // one for each value of the upper 16 bits of a key
constexpr int64_t MANY = 1 << 15;  // from this many elements on, counting them in bins pays

// Partially sorts keys[n]: afterwards, the key of each given rank is at index rank - begin. ranks[many] ascend. begin:
// the rank of the smallest key.
void rank(int32_t* keys, int64_t n, int64_t begin, const int64_t* ranks, int64_t many) {
  if (many == 0) return;
  const int64_t half = many / 2, place = ranks[half] - begin;
  std::nth_element(keys, keys + place, keys + n);
  rank(keys, place, begin, ranks, half);
  rank(keys + place + 1, n - place - 1, begin + place + 1, ranks + half + 1, many - half - 1);
}

float of_key(int32_t key) { return key < 0 ? -float_of(-key) : float_of(key); }

// Buckets of equal population.
struct Buckets {
  // many: number of buckets. ranks: the rank of the largest element of each bucket but the last. members: number of
  // elements of each bucket.
  int64_t many, ranks[256], members[256] = {};
  int32_t bounds[512];  // the keys of the elements with these ranks, padded with the largest key
  double sums[256] = {};

  Buckets(int64_t n, int64_t q) : many(q) {
    for (int64_t i = 1; i < q; i++) ranks[i - 1] = i * n / q - 1;
    std::fill(bounds, bounds + 512, INT32_MAX);
  }
  static int step_for(int64_t most) {  // the first step of a binary search among `most` bounds
    int step = 1;
    while (2 * step - 1 < most) step *= 2;
    return step;
  }
};

void few_quantiles(const Loops* loops, const float* x, int64_t n, int bits, uint8_t* codes, Buckets& all) {
  std::vector<int32_t> keys((size_t(n)));
  loops->methods->order_keys(x, n, keys.data());
  rank(keys.data(), n, 0, all.ranks, all.many - 1);
  for (int64_t r = 0; r < all.many - 1; r++) all.bounds[r] = keys[size_t(all.ranks[r])];
  loops->methods->sketch_emit(x, n, all.bounds, Buckets::step_for(all.many - 1), bits, codes, all.sums, all.members);
}

// Counts elements in bins. If no bound lies in a bin, all its elements have the same code, and their sum follows from
// the sum of the lower 16 bits of their keys. Only the elements of other bins (and of the bin of -infinity) are
// examined one by one.
void many_quantiles(const Loops* loops, const float* x, int64_t n, int bits, uint8_t* codes, Buckets& all) {
  struct Mixed {
    int64_t start, size, first;  // a bin with bounds: the rank of its first element, its size, the index of its first bound
  };
  constexpr int64_t TOGETHER = 1 << 23, LOWEST = 128;  // LOWEST: the bin of -infinity
  std::vector<uint64_t> bins(size_t(BINS), 0u), counts(bins), lows(bins);
  for (int64_t i = 0; i < n; i += TOGETHER) {
    loops->methods->order_bins(x + i, std::min(TOGETHER, n - i), bins.data());
    for (size_t bin = 0; bin < size_t(BINS); bin++)
      counts[bin] += bins[bin] >> 40, lows[bin] += bins[bin] & ((uint64_t{1} << 40) - 1), bins[bin] = 0;
  }
  std::vector<uint16_t> places(size_t(BINS), uint16_t(0)), slots(places);
  std::vector<Mixed> mixed;
  int64_t start = 0, r = 0, wanted = 0, most = 1;
  for (int64_t bin = 0; bin < BINS; bin++) {
    const int64_t size = int64_t(counts[size_t(bin)]), stop = start + size, first = r;
    while (r < all.many - 1 && all.ranks[r] < stop) r++;
    places[size_t(bin)] = uint16_t(first);
    if (r > first || (bin == LOWEST && size)) {
      mixed.push_back({start, size, first});
      slots[size_t(bin)] = uint16_t(mixed.size() - 1), places[size_t(bin)] |= 256;
      wanted += size, most = std::max(most, r - first);
    } else if (size) {
      const int32_t key = int32_t(bin - 32768) * 65536;
      const double low = double(lows[size_t(bin)]), lowest = of_key(key);
      all.sums[first] += double(size) * lowest + (low ? low * (double(of_key(key + 1)) - lowest) : 0.0);
      all.members[first] += size;
    }
    start = stop;
  }
  std::vector<float> values(size_t(wanted + 16));
  std::vector<int32_t> positions(values.size()), keys(values.size()), sorted(values.size());
  loops->methods->order_codes(x, n, places.data(), bits, codes, values.data(), positions.data());
  loops->methods->order_keys(values.data(), wanted, keys.data());
  std::vector<int64_t> next;
  int64_t end = 0;
  for (const Mixed& each : mixed) next.push_back(end), end += each.size;
  const auto bin_of = [&](int64_t i) { return size_t((keys[size_t(i)] >> 16) + 32768); };
  for (int64_t i = 0; i < wanted; i++) sorted[size_t(next[slots[bin_of(i)]]++)] = keys[size_t(i)];
  for (size_t slot = 0; slot < mixed.size(); slot++) {
    const Mixed& each = mixed[slot];
    const int64_t last = slot + 1 < mixed.size() ? mixed[slot + 1].first : all.many - 1;
    int32_t* const own = sorted.data() + (next[slot] - each.size);
    rank(own, each.size, each.start, all.ranks + each.first, last - each.first);
    for (int64_t i = each.first; i < last; i++) all.bounds[i] = own[all.ranks[i] - each.start];
  }
  const int64_t bytes = 8 % bits ? (n + 7) / 8 * bits : (n * bits + 7) / 8;
  for (int64_t i = 0; i < wanted; i++) {
    const int place = places[bin_of(i)] & 255;
    int code = place;
    for (int step = Buckets::step_for(most); step; step >>= 1) code += keys[size_t(i)] > all.bounds[code + step - 1] ? step : 0;
    all.sums[code] += double(values[size_t(i)]), all.members[code]++;
    const int64_t at = positions[size_t(i)] * bits;  // codes already holds `place`
    const uint32_t more = uint32_t(code - place) << at % 8;
    uint8_t* const to = codes + at / 8;
    if (at / 8 + 1 < bytes)
      set(reinterpret_cast<uint16_t*>(to), 0, uint16_t(get(reinterpret_cast<uint16_t*>(to), 0) + more));
    else
      *to = uint8_t(*to + more);
  }
}

}  // namespace

// ---- equally populated buckets: sketch ------------------------------------------------------------------------------

API int64_t grace_sketch_encode(const Loops* loops, const float* x, uint8_t* codes, float* means, int64_t n, int64_t q,
                                int64_t bits, int64_t) try {
  if (n <= 0 || q <= 0) return 0;
  Buckets all(n, q);
  (n < MANY ? few_quantiles : many_quantiles)(loops, x, n, int(bits), codes, all);
  for (int64_t i = 0; i < q; i++)
    set(means, i, float(all.sums[i]) / float(std::max<int64_t>(all.members[i], 1)));
  return 0;
} catch (const std::bad_alloc&) {
  return -2;
}

API void grace_sketch_mean(const Loops* loops, const uint8_t* const* codes, const float* const* means, int64_t workers,
                           float* out, int64_t n, int64_t q, int64_t bits, int64_t threads) {
  if (n <= 0) return;
  std::vector<float> tables(size_t(256 * workers), __builtin_nanf(""));  // invalid codes decode to NaN
  for (int64_t w = 0; w < workers; w++) memcpy(&tables[size_t(256 * w)], means[w], size_t(q) * 4);
  const bool stream = streams(nullptr, nullptr, out, n);
  split(n, PIECE, threads, [&](int64_t begin, int64_t end, int64_t) {
    loops->methods->sketch_sum(codes, tables.data(), int(bits), workers, out, begin, end, stream);
  });
}

// ---- the largest of each sign: adaq ---------------------------------------------------------------------------------

namespace {

// The `count` largest candidates of one sign; among ties, the first ones.
struct Side {
  std::vector<int32_t> keys;
  int64_t count = 0, ties = 0;
  int32_t bound = INT32_MAX;  // the smallest key that is sent
  double sum = 0;

  // Sets the bound to the wanted-th largest of the first `many` keys. `keys` needs room for 16 more. Returns false if
  // many < wanted.
  bool choose(const Loops* loops, int64_t many, int64_t wanted) {
    if (wanted <= 0) return true;
    if (many < wanted) return false;
    std::fill_n(keys.begin() + many, 16, 0);
    bound = loops->methods->bound_of(keys.data(), (many + 15) / 16 * 16, wanted);
    ties = wanted;
    for (int64_t i = 0; i < many; i++) ties -= keys[size_t(i)] > bound;
    return true;
  }
};

}  // namespace

API int64_t grace_adaq_count(const Loops* loops, const float* x, const float* residual, float* out, int64_t* signs,
                             int64_t n, int64_t threads) try {
  n = std::max<int64_t>(n, 0);
  struct Signs {
    int64_t counts[2] = {};
    int32_t most = 0;
  };
  std::vector<Signs> found(size_t((n + PIECE - 1) / PIECE));
  split(n, PIECE, threads, [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t i = begin; i < end; i += PIECE) {
      Signs& each = found[size_t(i / PIECE)];
      each.most = loops->methods->adaq_count(x + i, at(residual, i), at(out, i), std::min(PIECE, end - i), each.counts);
    }
  });
  signs[0] = signs[1] = signs[2] = 0;
  for (const Signs& each : found) {
    signs[0] += each.counts[0], signs[1] += each.counts[1];
    signs[2] = std::max<int64_t>(signs[2], each.most);
  }
  return 0;
} catch (const std::bad_alloc&) {
  return -2;
}

API int64_t grace_adaq_encode(const Loops* loops, const float* x, const int64_t* signs, double ratio, float* means,
                              int32_t* sent, float* left, int64_t capacity, int64_t n) try {
  n = std::max<int64_t>(n, 0);
  const auto share = [=](int64_t count) { return int64_t(-__builtin_floor(-ratio * double(count))); };
  std::vector<int32_t> keys = n ? sample(x, nullptr, n) : std::vector<int32_t>();
  const double many = double(share(signs[0]) + share(signs[1]));
  const double expected = many / double(std::max<int64_t>(n, 1)) * double(keys.size());
  double place = expected + 3 * std::max(1.0, __builtin_sqrt(expected)) + 1;
  Candidates chosen;
  for (;; place *= 2) {
    int32_t bound = 1;
    if (place < double(keys.size())) {
      std::nth_element(keys.begin(), keys.begin() + int64_t(place), keys.end(), std::greater<int32_t>());
      bound = std::max(1, keys[size_t(place)]);
    }
    chosen.count = 0;
    constexpr int64_t TILE = 4096;
    for (int64_t i = 0; i < n; i += TILE) {
      if (chosen.capacity - chosen.count < TILE + 16 && !chosen.reserve(2 * chosen.capacity + 2 * TILE)) return -2;
      chosen.count += loops->select(x + i, nullptr, nullptr, std::min(TILE, n - i), bound, MAGNITUDE,
                                    chosen.values + chosen.count, chosen.positions + chosen.count,
                                    chosen.capacity - chosen.count, int32_t(i), grace::NONE).count;
    }
    // Branch-free, because both signs are equally likely, so that branches would be mispredicted.
    Side sides[2];  // above and below zero
    int64_t found[2] = {0, 0}, nans = 0;
    for (Side& side : sides) side.keys.resize(size_t(chosen.count + 16));
    for (int64_t i = 0; i < chosen.count; i++) {
      const float value = chosen.values[i];
      const int32_t each = key(value);
      sides[0].keys[size_t(found[0])] = sides[1].keys[size_t(found[1])] = each;
      found[0] += value > 0, found[1] += value < 0, nans += value != value;
    }
    for (int64_t i = 0; i < 2; i++) sides[i].count = share(signs[i]);
    // NaN ranks above all numbers: each NaN takes the place of one positive number.
    const bool enough = sides[0].choose(loops, found[0], sides[0].count - nans) &
                        sides[1].choose(loops, found[1], sides[1].count);
    if (!enough && bound > 1) continue;
    int64_t kept = 0;
    for (int64_t i = 0; i < chosen.count; i++) {
      const float value = chosen.values[i];
      const int32_t each = key(value), position = chosen.positions[i], negative = value < 0;
      Side& side = sides[negative];
      const bool equal = each == side.bound, number = value == value;
      const bool taken = number & ((each > side.bound) | (equal & (side.ties > 0)));
      side.ties -= equal & number;
      side.sum += taken ? double(value) : 0.0;
      chosen.values[kept] = value, chosen.positions[kept] = position ^ -negative;
      kept += taken | (each == INFINITE);
    }
    const float wrong = signs[2] >= INFINITE ? __builtin_nanf("") : 0.0f;
    float both[2];
    for (int64_t i = 0; i < 2; i++) {
      both[i] = float(sides[i].sum) / float(std::max<int64_t>(sides[i].count, 1)) + wrong;
      set(means, i, both[i]);
    }
    if (kept > 0 && kept <= capacity) {
      memcpy(sent, chosen.positions, size_t(kept) * 4);
      for (int64_t i = 0; left && i < kept; i++) {
        const int32_t negative = chosen.positions[i] < 0;
        set(left, chosen.positions[i] ^ -negative, chosen.values[i] - both[negative]);
      }
    }
    return kept;
  }
} catch (const std::bad_alloc&) {
  return -2;
}

// ---- numbers of 32, 16, 8 or 0 bits: inceptionn ---------------------------------------------------------------------

namespace {

Inceptionn inceptionn(int64_t lowest, int64_t middle) {
  const auto bits = [](int64_t power) { return int32_t(power + 127) << 23; };
  return {bits(lowest), bits(middle), bits(0), float_of(bits(7 - middle))};
}

}  // namespace

API void grace_inceptionn_count(const Loops* loops, const float* x, int64_t* starts, int64_t n, int64_t lowest,
                                int64_t middle, int64_t threads) {
  const Inceptionn how = inceptionn(lowest, middle);
  set(starts, 0, int64_t(0)), set(starts, 1, int64_t(0)), set(starts, 2, int64_t(0));
  split(std::max<int64_t>(n, 0), PIECE, threads, [=, &how](int64_t begin, int64_t end, int64_t) {
    for (int64_t i = begin; i < end; i += PIECE) {
      int64_t counts[3];
      loops->methods->inceptionn_count(&how, x + i, std::min(PIECE, end - i), counts);
      for (int64_t k = 0; k < 3; k++) set(starts, 3 * (i / PIECE + 1) + k, counts[k]);
    }
  });
  for (int64_t i = 3; i < 3 * ((std::max<int64_t>(n, 0) + PIECE - 1) / PIECE + 1); i++)
    set(starts, i, get(starts, i) + get(starts, i - 3));
}

API void grace_inceptionn_encode(const Loops* loops, const float* x, const int64_t* starts, uint8_t* tags, float* three,
                                 uint8_t* two, uint8_t* one, int64_t n, int64_t lowest, int64_t middle, int64_t threads) {
  const Inceptionn how = inceptionn(lowest, middle);
  split(std::max<int64_t>(n, 0), PIECE, threads, [=, &how](int64_t begin, int64_t end, int64_t) {
    const int64_t at = 3 * (begin / PIECE);
    if (begin < end)
      loops->methods->inceptionn_emit(&how, x + begin, end - begin, tags + begin / 4,
                                      reinterpret_cast<float*>(reinterpret_cast<char*>(three) + 4 * get(starts, at)),
                                      two + 2 * get(starts, at + 1), one + get(starts, at + 2));
  });
}

API int64_t grace_inceptionn_mean(const Loops* loops, const uint8_t* const* tags, const float* const* three,
                                  const uint8_t* const* two, const uint8_t* const* one, const int64_t* counts,
                                  int64_t workers, float* out, int64_t n, int64_t lowest, int64_t middle, int64_t threads) {
  if (n <= 0) return -1;
  const Inceptionn how = inceptionn(lowest, middle);
  for (int64_t w = 0; w < workers; w++) {
    int64_t found[3] = {};
    loops->methods->tags_count(tags[w], n, found);
    for (int64_t k = 0; k < 3; k++)
      if (found[k] != counts[3 * w + k]) return w;
  }
  const bool stream = streams(nullptr, nullptr, out, n);
  const uint8_t nothing[64] = {};  // replaces empty arrays, because masked loads from unmapped memory are slow
  split(n, PIECE, threads, [&](int64_t begin, int64_t end, int64_t) {
    std::vector<Streams> from;
    for (int64_t w = 0; w < workers; w++) {
      int64_t at[3] = {};
      loops->methods->tags_count(tags[w], begin, at);
      const auto place = [&](const void* p, int64_t k, int64_t size) {
        return counts[3 * w + k] ? static_cast<const uint8_t*>(p) + size * at[k] : nothing;
      };
      const uint8_t* wide = place(three[w], 0, 4);
      from.push_back({reinterpret_cast<const float*>(wide), place(two[w], 1, 2), place(one[w], 2, 1)});
    }
    loops->methods->inceptionn_sum(&how, tags, from.data(), workers, out, begin, end, stream);
  });
  return -1;
}

// ---- tails: sidco ---------------------------------------------------------------------------------------------------

API int64_t grace_excess(const Loops* loops, const float* x, float bound, double* found, int64_t n, int64_t threads) try {
  n = std::max<int64_t>(n, 0);
  std::vector<grace::Excess> pieces(size_t((n + PIECE - 1) / PIECE));
  split(n, PIECE, threads, [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t i = begin; i < end; i += PIECE)
      pieces[size_t(i / PIECE)] = loops->methods->excess(x + i, std::min(PIECE, end - i), bound);
  });
  grace::Excess all = {};  // added in order, so that the result does not depend on threads
  for (const auto& each : pieces) all.count += each.count, all.sum += each.sum, all.squares += each.squares;
  set(found, 0, double(all.count)), set(found, 1, all.sum), set(found, 2, all.squares);
  return 0;
} catch (const std::bad_alloc&) {
  return -2;
}

// ---- cosine transforms of chunks: demo ------------------------------------------------------------------------------

namespace {

int64_t whole(int64_t n) { return (n + 15) / 16 * 16; }

// Owns the tables of a transform.
class Basis {
  std::vector<float> odd, halves, matrix;

 public:
  Cosines tables;

  explicit Basis(int64_t n) {
    const int64_t lanes = whole(n);
    std::vector<double> cosines;  // cosines[i] = cos(i * pi / 2n)
    for (int64_t i = 0; i < 4 * n; i++)
      cosines.push_back(__builtin_cos(double(i) * 3.14159265358979323846 / double(2 * n)));
    matrix.resize(size_t(n * lanes));
    for (int64_t i = 0; i < n; i++) {
      const double scale = __builtin_sqrt((i ? 2.0 : 1.0) / double(n));
      for (int64_t j = 0, turn = i; j < n; j++) {
        matrix[size_t(i * lanes + j)] = float(scale * cosines[size_t(turn)]);
        turn += 2 * i;
        if (turn >= 4 * n) turn -= 4 * n;
      }
    }
    const auto part = [&](int64_t i, int64_t j) { return matrix[size_t(i * lanes + j)]; };
    int64_t size = n, step = 1;
    for (; size % 2 == 0; size /= 2) step *= 2;
    for (int64_t i = 0; i < size; i++)
      for (int64_t j = 0; j < size; j++) odd.push_back(part(step * i, j));
    for (int64_t i = 0; i < size; i++)
      for (int64_t j = 0; j < size; j++) odd.push_back(part(step * j, i));
    for (; size < n; size *= 2) {
      step /= 2;
      for (int64_t i = 0; i < size; i++)
        for (int64_t j = 0; j < size; j++) halves.push_back(part(step * (2 * i + 1), j));
    }
    tables = {n, int64_t(halves.size()), odd.data(), halves.data(), matrix.data()};
  }
  Basis(const Basis&) = delete;
  Basis& operator=(const Basis&) = delete;
};

// A matrix [a, b] in chunks [rows, columns], the last ones padded with zeros. Each chunk sends k coefficients. Chunks
// of a vector have one row; several of them are transformed together.
struct Chunks {
  int64_t a, b, rows, columns, k;
  int64_t across = (b + columns - 1) / columns, many = (a + rows - 1) / rows * across, width = rows * columns;
  int64_t together = rows == 1 ? std::min<int64_t>(64, many) : 1;
  int64_t above = bits_above(width);  // bits of an index in a chunk, beyond the lower eight
  Basis down{rows}, side{columns};

  static int64_t bits_above(int64_t width) {
    int64_t bits = 0;
    while (bits < 8 && (width - 1) >> (8 + bits)) bits++;
    return bits;
  }
  int64_t place(int64_t chunk) const { return chunk / across * rows * b + chunk % across * columns; }
  // Returns the tile of `count` chunks; count is 1 unless chunks have one row.
  Tile tile(int64_t chunk, int64_t count) const {
    if (rows == 1) {
      const int64_t last = std::min(columns, b - (chunk + count - 1) * columns);
      return {nullptr, &side.tables, count, columns, columns, count, columns, last, 0};
    }
    const int64_t height = std::min(rows, a - chunk / across * rows), wide = std::min(columns, b - chunk % across * columns);
    const int64_t next = chunk + 1 < many ? place(chunk + 1) - place(chunk) : 0;
    return {&down.tables, &side.tables, rows, columns, b, height, wide, wide, next};
  }
  // Calls each(tile, first chunk, number of chunks, first element, thread) for all tiles.
  template <class Each>
  void tiles(int64_t threads, const Each& each) const {
    split(many * width, together * width, threads, [&](int64_t begin, int64_t end, int64_t t) {
      for (int64_t chunk = begin / width; chunk < end / width; chunk += together) {
        const int64_t count = std::min(together, end / width - chunk);
        each(tile(chunk, count), chunk, count, place(chunk), t);
      }
    });
  }
  // Returns whether the rows of a tile are whole cache lines. If not, streaming stores cost more than they save.
  bool in_lines(const float* out) const {
    return reinterpret_cast<uintptr_t>(out) % 64 == 0 && b % 16 == 0 && columns % 16 == 0;
  }
};

// Returns the number of groups for finding the k largest of `width` elements, or 0 if groups do not pay. The k-th
// largest of the groups' maxima is a lower bound on the k-th largest element.
int64_t groups_of(int64_t k, int64_t width) {
  int64_t groups = 64;
  while (groups < 2 * k) groups *= 2;
  return 2 * groups <= width ? groups : 0;
}

// Scratch of a thread for one tile.
struct Scratch {
  std::vector<float> room, values, total, senders;
  std::vector<int32_t> rows, columns, keys;
  std::vector<uint64_t> marks;
  Candidates found;
  int64_t groups = 0;  // number of groups in the search for the largest coefficients; 0: no groups

  bool reserve(const Chunks& chunks) {
    room.resize(size_t(4 * whole(std::max(chunks.rows, chunks.together)) * whole(chunks.columns) + 16));
    groups = groups_of(chunks.k, chunks.width);
    keys.resize(size_t(whole(chunks.width)));
    const size_t all = size_t(chunks.together * chunks.width);
    values.reserve(all), rows.reserve(all), columns.reserve(all);
    return found.reserve(chunks.width + 16);
  }
  // Returns `room`, aligned to a cache line.
  float* begin() { return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(room.data()) + 63) & ~uintptr_t(63)); }
  void clear() { values.clear(), rows.clear(), columns.clear(); }
  // Adds a term. each: the index of the chunk in its tile. place: the index of the coefficient in the chunk.
  void add(const Chunks& chunks, int64_t each, int32_t place, float value) {
    rows.push_back(chunks.rows == 1 ? int32_t(each) : place / int32_t(chunks.columns));
    columns.push_back(chunks.rows == 1 ? place : place % int32_t(chunks.columns));
    values.push_back(value);
  }
  Terms terms() const { return {int64_t(values.size()), rows.data(), columns.data(), values.data()}; }
  // Selects the k largest coefficients of a chunk; among ties, those with lower indices.
  void choose(const Loops* loops, const float* coefficients, int64_t width, int64_t k) {
    int32_t bound = 0;
    if (groups) {
      loops->methods->groups_largest(coefficients, nullptr, width, groups, keys.data());
      bound = loops->methods->bound_of(keys.data(), groups, k);
    }
    found.count = loops->select(coefficients, nullptr, nullptr, width, bound, INFINITE, found.values, found.positions,
                                found.capacity, 0, grace::NONE).count;
    for (int64_t i = 0; i < found.count; i++) keys[size_t(i)] = key(found.values[i]);
    std::fill(keys.begin() + found.count, keys.begin() + whole(found.count), 0);
    bound = loops->methods->bound_of(keys.data(), whole(found.count), k);
    int64_t ties = k, kept = 0;
    for (int64_t i = 0; i < found.count; i++) ties -= keys[size_t(i)] > bound;
    for (int64_t i = 0; i < found.count; i++) {  // branch-free: branches would be mispredicted
      const int32_t each = keys[size_t(i)];
      found.values[kept] = found.values[i], found.positions[kept] = found.positions[i];
      kept += int64_t(each > bound) | (int64_t(each == bound) & int64_t(ties > 0));
      ties -= each == bound;
    }
  }
};

// Returns one scratch per thread.
std::vector<Scratch> scratches(const Chunks& chunks, int64_t threads) {
  std::vector<Scratch> all((size_t(threads)));
  for (Scratch& each : all)
    if (!each.reserve(chunks)) throw std::bad_alloc();
  return all;
}

// Packs codes of up to 8 bits, given as bytes, like grace/ops/packing.py. unpack_byte is the inverse for one code.
void pack_bytes(const std::vector<uint8_t>& codes, int64_t bits, uint8_t* bytes) {
  const int64_t n = int64_t(codes.size());
  memset(bytes, 0, size_t(8 % bits ? (n + 7) / 8 * bits : (n * bits + 7) / 8));
  for (int64_t i = 0, at = 0; i < n; i++, at += bits) {
    const uint32_t code = uint32_t(codes[size_t(i)]) << at % 8;
    bytes[at / 8] = uint8_t(bytes[at / 8] | code);
    if (at % 8 + bits > 8) bytes[at / 8 + 1] = uint8_t(code >> 8);
  }
}

uint8_t unpack_byte(const uint8_t* bytes, int64_t bits, int64_t i) {
  const int64_t at = i * bits;
  uint32_t code = uint32_t(bytes[at / 8]) >> at % 8;
  if (at % 8 + bits > 8) code |= uint32_t(bytes[at / 8 + 1]) << (8 - at % 8);
  return uint8_t(code & ((1u << bits) - 1));
}

// places = each coefficient's index in its chunk. Returns false unless they ascend in each chunk and lie inside it.
bool places_of(const Chunks& chunks, const uint8_t* low, const uint8_t* high, std::vector<uint16_t>& places) {
  const int64_t n = chunks.many * chunks.k;
  places.resize(size_t(n));
  bool wrong = false;
  for (int64_t i = 0; i < n; i++)
    places[size_t(i)] = uint16_t(low[i] | (chunks.above ? unpack_byte(high, chunks.above, i) << 8 : 0));
  for (int64_t i = 0; i < n; i += chunks.k) {
    for (int64_t j = i + 1; j < i + chunks.k; j++) wrong |= places[size_t(j)] <= places[size_t(j - 1)];
    wrong |= places[size_t(i + chunks.k - 1)] >= chunks.width;
  }
  return !wrong;
}

}  // namespace

API int64_t grace_demo_encode(const Loops* loops, const float* x, const float* residual, float* out, float* values,
                              uint8_t* low, uint8_t* high, int64_t a, int64_t b, int64_t rows, int64_t columns,
                              int64_t k, int64_t threads) try {
  if (a <= 0 || b <= 0 || k <= 0) return 0;
  threads = std::clamp<int64_t>(threads, 1, 64);
  const Chunks chunks{a, b, rows, columns, k};
  std::vector<Scratch> own = scratches(chunks, threads);
  std::vector<uint8_t> upper(size_t(chunks.above ? chunks.many * k : 0));
  chunks.tiles(threads, [&](const Tile& tile, int64_t chunk, int64_t count, int64_t first, int64_t t) {
    Scratch& scratch = own[size_t(t)];
    const float* coefficients = loops->methods->demo_of(&tile, x + first, at(residual, first), scratch.begin());
    scratch.clear();
    for (int64_t each = 0; each < count; each++) {
      scratch.choose(loops, coefficients + each * chunks.width, chunks.width, k);
      const Candidates& found = scratch.found;
      const int64_t to = (chunk + each) * k;
      for (int64_t i = 0; i < k; i++) {
        set(values, to + i, found.values[i]);
        low[to + i] = uint8_t(found.positions[i]);
        if (chunks.above) upper[size_t(to + i)] = uint8_t(found.positions[i] >> 8);
        if (out) scratch.add(chunks, each, found.positions[i], found.values[i]);
      }
    }
    const Terms terms = scratch.terms();
    if (out) loops->methods->demo_left(&tile, &terms, nullptr, out + first, scratch.begin());
  });
  if (chunks.above) pack_bytes(upper, chunks.above, high);
  return 0;
} catch (const std::bad_alloc&) {
  return -2;
}

API int64_t grace_demo_left(const Loops* loops, const float* x, const float* values, const uint8_t* low,
                            const uint8_t* high, float* out, int64_t a, int64_t b, int64_t rows, int64_t columns,
                            int64_t k, int64_t threads) try {
  if (a <= 0 || b <= 0 || k <= 0) return -1;
  threads = std::clamp<int64_t>(threads, 1, 64);
  const Chunks chunks{a, b, rows, columns, k};
  std::vector<uint16_t> places;
  if (!places_of(chunks, low, high, places)) return 0;
  std::vector<Scratch> own = scratches(chunks, threads);
  chunks.tiles(threads, [&](const Tile& tile, int64_t chunk, int64_t count, int64_t first, int64_t t) {
    Scratch& scratch = own[size_t(t)];
    scratch.clear();
    for (int64_t each = 0; each < count; each++)
      for (int64_t i = (chunk + each) * k; i < (chunk + each + 1) * k; i++)
        scratch.add(chunks, each, places[size_t(i)], get(values, i));
    const Terms terms = scratch.terms();
    loops->methods->demo_left(&tile, &terms, x + first, out + first, scratch.begin());
  });
  return -1;
} catch (const std::bad_alloc&) {
  return -2;
}

API int64_t grace_demo_mean(const Loops* loops, const float* const* values, const uint8_t* const* low,
                            const uint8_t* const* high, int64_t workers, float* out, int64_t a, int64_t b,
                            int64_t rows, int64_t columns, int64_t k, int64_t senders, int64_t sign,
                            int64_t threads) try {
  if (a <= 0 || b <= 0 || k <= 0) return -1;
  threads = std::clamp<int64_t>(threads, 1, 64);
  const Chunks chunks{a, b, rows, columns, k};
  std::vector<std::vector<uint16_t>> places((size_t(workers)));
  for (int64_t w = 0; w < workers; w++)
    if (!places_of(chunks, low[w], high ? high[w] : nullptr, places[size_t(w)])) return w;
  std::vector<Scratch> own = scratches(chunks, threads);
  const bool stream = chunks.in_lines(out) && streams(nullptr, nullptr, out, a * b);
  for (Scratch& each : own) {
    each.total.resize(size_t(chunks.width)), each.senders.resize(size_t(chunks.width));
    each.marks.resize(size_t((chunks.width + 63) / 64));
  }
  chunks.tiles(threads, [&](const Tile& tile, int64_t chunk, int64_t count, int64_t first, int64_t t) {
    Scratch& scratch = own[size_t(t)];
    scratch.clear();
    for (int64_t each = 0; each < count; each++) {
      std::fill(scratch.marks.begin(), scratch.marks.end(), 0);
      for (int64_t w = 0; w < workers; w++)
        for (int64_t i = (chunk + each) * k; i < (chunk + each + 1) * k; i++) {
          const size_t place = places[size_t(w)][size_t(i)];
          uint64_t& mark = scratch.marks[place / 64];
          const bool begun = mark >> place % 64 & 1;
          mark |= uint64_t{1} << place % 64;
          scratch.total[place] = (begun ? scratch.total[place] : 0.0f) + get(values[w], i);
          scratch.senders[place] = (begun ? scratch.senders[place] : 0.0f) + 1.0f;
        }
      for (size_t i = 0; i < scratch.marks.size(); i++)
        for (uint64_t left = scratch.marks[i]; left; left &= left - 1) {
          const size_t place = 64 * i + size_t(__builtin_ctzll(left));
          const float divisor = senders ? scratch.senders[place] : float(workers);
          scratch.add(chunks, each, int32_t(place), scratch.total[place] / divisor);
        }
    }
    const Terms terms = scratch.terms();
    loops->methods->demo_values(&tile, &terms, out + first, scratch.begin(), sign != 0, stream);
  });
  return -1;
} catch (const std::bad_alloc&) {
  return -2;
}

// ---- integers summed on the wire: shared_int ------------------------------------------------------------------------

namespace {

// Calls each(begin, size, index of the block) for the part of each block in begin .. end. block == 0 means that all
// elements are one block.
template <class Each>
void parts_of_blocks(int64_t begin, int64_t end, int64_t block, const Each& each) {
  for (int64_t i = begin; i < end;) {
    const int64_t b = block ? i / block : 0, stop = block ? std::min((b + 1) * block, end) : end;
    each(i, stop - i, b);
    i = stop;
  }
}

}  // namespace

API void grace_shared_int_encode(const Loops* loops, const float* x, const float* scales, uint8_t* codes, int64_t n,
                                 int64_t block, int64_t top, int64_t wide, const uint16_t* table, const uint16_t* offsets,
                                 int64_t start, int64_t threads) {
  const Noise noise = {table, offsets, start / 65536, start};
  split(std::max<int64_t>(n, 0), PIECE, threads, [=, &noise](int64_t begin, int64_t end, int64_t) {
    parts_of_blocks(begin, end, block, [&](int64_t i, int64_t size, int64_t b) {
      loops->methods->shared_int_emit(x + i, size, get(scales, b), float(top), &noise, i, codes + i * (wide ? 4 : 1),
                                      wide != 0);
    });
  });
}

API void grace_shared_int_values(const Loops* loops, const float* x, const uint8_t* codes, const float* scales, float* out,
                                 int64_t n, int64_t block, int64_t steps, int64_t wide, int64_t threads) {
  const bool stream = streams(x, nullptr, out, n) && block % 16 == 0;
  split(std::max<int64_t>(n, 0), PIECE, threads, [=](int64_t begin, int64_t end, int64_t) {
    parts_of_blocks(begin, end, block, [&](int64_t i, int64_t size, int64_t b) {
      loops->methods->shared_int_values(at(x, i), codes + i * (wide ? 4 : 1), size, get(scales, b), steps, out + i,
                                        wide != 0, stream);
    });
  });
}

// ---- coded positions, as in grace/ops/index_coding.py ---------------------------------------------------------------

namespace {

// Returns the number of bytes of k packed codes, as in grace/ops/packing.py.
int64_t packed(int64_t bits, int64_t k) { return 8 % bits ? (k + 7) / 8 * bits : (k * bits + 7) / 8; }

// Packs bits shift .. shift + bits - 1 of each of values[k], like grace/ops/packing.py: eight values take `bits` bytes.
void pack_plane(const int32_t* values, int64_t k, int64_t shift, int64_t bits, uint8_t* plane) {
  const int64_t bytes = packed(bits, k);
  for (int64_t j = 0, byte = 0; j < k; j += 8, byte += bits) {
    uint64_t word = 0;
    for (int64_t i = 0; i < std::min<int64_t>(8, k - j); i++)
      word |= uint64_t(uint32_t(get(values, j + i)) >> shift & ((1u << bits) - 1)) << i * bits;
    memcpy(plane + byte, &word, size_t(std::min(bits, bytes - byte)));  // little-endian
  }
}

// The inverse of pack_plane: ORs the bits into values[k], where they must be 0.
void unpack_plane(const uint8_t* plane, int64_t k, int64_t shift, int64_t bits, int32_t* values) {
  const int64_t bytes = packed(bits, k);
  for (int64_t j = 0, byte = 0; j < k; j += 8, byte += bits) {
    uint64_t word = 0;
    memcpy(&word, plane + byte, size_t(std::min(bits, bytes - byte)));
    for (int64_t i = 0; i < std::min<int64_t>(8, k - j); i++) {
      const uint32_t code = uint32_t(word >> i * bits) & ((1u << bits) - 1);
      set(values, j + i, get(values, j + i) | int32_t(code << shift));
    }
  }
}

}  // namespace

API int64_t grace_positions_write(const Loops*, const int32_t* positions, int64_t k, int64_t lower, uint8_t* const* planes,
                                  uint8_t* upper, int64_t marks) {
  memset(upper, 0, size_t((marks + 7) / 8));
  for (int64_t j = 0; j < k; j++) {
    const int64_t mark = int64_t(uint32_t(get(positions, j)) >> lower) + j;
    if (mark >= marks) return j;
    upper[mark >> 3] |= uint8_t(1u << (mark & 7));
  }
  for (int64_t shift = 0; shift < lower; shift += 8)
    pack_plane(positions, k, shift, std::min<int64_t>(8, lower - shift), planes[shift / 8]);
  return k;
}

API int64_t grace_positions_read(const Loops*, const uint8_t* const* planes, const uint8_t* upper, int64_t marks, int64_t k,
                                 int64_t lower, int32_t* positions) {
  int64_t j = 0;
  for (int64_t first = 0; first < marks; first += 64) {
    uint64_t left = 0;
    memcpy(&left, upper + first / 8, size_t(std::min<int64_t>(8, (marks - first + 7) / 8)));
    if (marks - first < 64) left &= (uint64_t(1) << (marks - first)) - 1;
    for (; left; left &= left - 1, j++)
      if (j < k) set(positions, j, int32_t(uint32_t(first + __builtin_ctzll(left) - j) << lower));
  }
  if (j != k) return j;
  for (int64_t shift = 0; shift < lower; shift += 8)
    unpack_plane(planes[shift / 8], k, shift, std::min<int64_t>(8, lower - shift), positions);
  return k;
}

// ---- the largest of each chunk, in two bits each: chunktopk ---------------------------------------------------------

namespace {

// Returns the number of bits of an index in a chunk, beyond the lower eight. chunk: a power of two.
int64_t above_byte(int64_t chunk) { return std::max<int64_t>(0, 63 - __builtin_clzll(uint64_t(chunk)) - 8); }

}  // namespace

API int64_t grace_chunktopk_encode(const Loops* loops, const float* x, const float* residual, float* out, uint8_t* low,
                                   uint8_t* high, uint8_t* codes, float* magnitudes, int64_t n, int64_t chunk, int64_t k,
                                   int64_t threads) try {
  const Out form = form_of(x, residual, out, n);
  const int64_t above = above_byte(chunk);
  threads = std::clamp<int64_t>(threads, 1, 64);
  std::vector<Candidates> scratch{size_t(threads)};
  for (auto& each : scratch)  // reserve the maximum before anything is written
    if (!each.reserve(2 * k + 4096)) return -2;
  const int64_t groups = groups_of(k, chunk);
  std::vector<int32_t> keys(size_t(threads * groups));
  split(n, chunk, threads, [&](int64_t begin, int64_t end, int64_t t) {
    Candidates& found = scratch[size_t(t)];
    int32_t* const most = keys.data() + t * groups;
    int64_t reached = 0;
    for (int64_t i = begin; i < end; i += chunk) {
      const int64_t size = std::min(chunk, end - i), many = std::min(k, size), first = i / chunk * k;
      const float *from = x + i, *other = at(residual, i);
      float* const to = at(out, i);
      int32_t bound = 0;
      if (size == chunk && groups) {
        loops->methods->groups_largest(from, other, size, groups, most);
        bound = loops->methods->bound_of(most, groups, k);
      }
      collect(loops, from, other, to, 0, size, bound, many, 4 * k, form, found, reached);
      keep_largest(loops, found, many, to);
      double sum = 0, sums[2] = {0, 0};
      for (int64_t j = 0; j < many; j++) sum += __builtin_fabsf(found.values[j]);
      const float mean = float(sum) / float(many);
      int64_t counts[2] = {0, 0};
      for (int64_t j = 0; j < many; j++) {
        const float magnitude = __builtin_fabsf(found.values[j]);
        sums[magnitude >= mean] += magnitude, counts[magnitude >= mean]++;
      }
      float means[2];
      for (int each = 0; each < 2; each++) {
        means[each] = float(sums[each]) / std::max(float(counts[each]), 1.0f);
        set(magnitudes, 2 * (i / chunk) + each, means[each]);
      }
      for (int64_t j = 0; j < many; j += 4) {
        unsigned byte = 0;
        for (int64_t l = j; l < std::min(j + 4, many); l++) {
          const float value = found.values[l];
          const bool larger = __builtin_fabsf(value) >= mean, negative = value < 0;
          byte |= (unsigned(larger) | unsigned(negative) << 1) << (l - j) * 2;
          if (to) set(to, found.positions[l], value - (negative ? -means[larger] : means[larger]));
        }
        codes[(first + j) / 4] = uint8_t(byte);
      }
      for (int64_t j = 0; j < many; j++) low[first + j] = uint8_t(found.positions[j]);
      if (above) pack_plane(found.positions, many, 8, above, high + first / 8 * above);
    }
  });
  return 0;
} catch (const std::bad_alloc&) {
  return -2;
}

API int64_t grace_chunktopk_values(const Loops*, const uint8_t* low, const uint8_t* high, const uint8_t* codes,
                                   const float* magnitudes, int64_t n, int64_t chunk, int64_t k, float* values,
                                   int32_t* positions) {
  const int64_t above = above_byte(chunk);
  int32_t most = 0;
  for (int64_t i = 0; i < n; i += chunk) {
    const int64_t many = std::min(k, std::min(chunk, n - i)), first = i / chunk * k, pair = 2 * (i / chunk);
    const float means[2] = {get(magnitudes, pair), get(magnitudes, pair + 1)};
    const float four[4] = {means[0], means[1], -means[0], -means[1]};
    for (int64_t j = 0; j < many; j++) {
      set(positions, first + j, int32_t(low[first + j]));
      set(values, first + j, four[codes[(first + j) / 4] >> j % 4 * 2 & 3]);
    }
    if (above) unpack_plane(high + first / 8 * above, many, 8, above, at(positions, first));
    for (int64_t j = 0; j < many; j++) {
      most = std::max(most, get(positions, first + j));
      set(positions, first + j, get(positions, first + j) + int32_t(i));
    }
  }
  return most >= chunk;
}

// ---- patches of weights: grace.patch --------------------------------------------------------------------------------

namespace {

constexpr int64_t PATCH_CHUNK = 65536;  // words of a chunk; a place is an offset in it

// Returns the number of lower bits of a place in the Elias-Fano code of a chunk: floor(log2(65536 / count)).
int64_t patch_lower(int64_t count) { return 16 - (count > 1 ? 64 - __builtin_clzll(uint64_t(count - 1)) : 0); }

// Sets x = values at the places of all chunks. If `steps` is not null, first values = x + steps.
template <class T>
void patch_set(uint8_t* x, const int32_t* counts, const uint16_t* places, const uint8_t* steps, uint8_t* values,
               int64_t chunks) {
  int64_t k = 0;
  for (int64_t chunk = 0; chunk < chunks; chunk++) {
    T* const here = reinterpret_cast<T*>(x) + chunk * PATCH_CHUNK;
    for (const int64_t end = k + get(counts, chunk); k < end; k++) {
      const int64_t place = get(places, k);
      T* const all = reinterpret_cast<T*>(values);
      if (steps) set(all, k, T(get(here, place) + get(reinterpret_cast<const T*>(steps), k)));
      set(here, place, get(all, k));
    }
  }
}

void patch_set(uint8_t* x, const int32_t* counts, const uint16_t* places, const uint8_t* steps, uint8_t* values,
               int64_t chunks, int64_t size) {
  switch (size) {
    case 1: return patch_set<uint8_t>(x, counts, places, steps, values, chunks);
    case 2: return patch_set<uint16_t>(x, counts, places, steps, values, chunks);
    case 4: return patch_set<uint32_t>(x, counts, places, steps, values, chunks);
    default: return patch_set<uint64_t>(x, counts, places, steps, values, chunks);
  }
}

constexpr int LARGE_STEP = 15;  // the code of 4 bits that stands for larger ones

template <class T>
int64_t patch_encode(const uint8_t* steps, uint8_t* out, uint8_t* large, int64_t k) {
  using Signed = std::make_signed_t<T>;
  constexpr int TOP = 8 * int(sizeof(T)) - 1;
  int64_t many = 0;
  for (int64_t j = 0; j < k; j++) {
    const T step = get(reinterpret_cast<const T*>(steps), j), code = T(T(step << 1) ^ T(Signed(step) >> TOP));
    const uint8_t part = uint8_t(std::min<T>(code, LARGE_STEP));
    if (code >= LARGE_STEP) set(reinterpret_cast<T*>(large), many++, code);
    out[j / 2] = uint8_t(j % 2 ? out[j / 2] | part << 4 : part);
  }
  return many;
}

template <class T>
int64_t patch_decode(const uint8_t* sent, const uint8_t* large, uint8_t* steps, int64_t k, int64_t many) {
  int64_t used = 0;
  for (int64_t j = 0; j < k; j++) {
    T code = T(sent[j / 2] >> (j % 2 ? 4 : 0) & 15);
    if (code == LARGE_STEP) {
      if (used == many) return 0;
      code = get(reinterpret_cast<const T*>(large), used++);
    }
    set(reinterpret_cast<T*>(steps), j, T((code >> 1) ^ T(0 - (code & 1))));
  }
  return used == many;
}

}  // namespace

API int64_t grace_patch_nibbles(const Loops*, const uint8_t* steps, uint8_t* out, uint8_t* large, int64_t k,
                                int64_t size) {
  switch (size) {
    case 1: return patch_encode<uint8_t>(steps, out, large, k);
    case 2: return patch_encode<uint16_t>(steps, out, large, k);
    case 4: return patch_encode<uint32_t>(steps, out, large, k);
    default: return patch_encode<uint64_t>(steps, out, large, k);
  }
}

API int64_t grace_patch_unnibbles(const Loops*, const uint8_t* sent, const uint8_t* large, uint8_t* steps, int64_t k,
                                  int64_t many, int64_t size) {
  switch (size) {
    case 1: return patch_decode<uint8_t>(sent, large, steps, k, many);
    case 2: return patch_decode<uint16_t>(sent, large, steps, k, many);
    case 4: return patch_decode<uint32_t>(sent, large, steps, k, many);
    default: return patch_decode<uint64_t>(sent, large, steps, k, many);
  }
}

API int64_t grace_patch_diff(const Loops* loops, const uint8_t* fresh, const uint8_t* base, int32_t* counts,
                             uint16_t* places, uint8_t* values, uint8_t* steps, int64_t n, int64_t size) {
  int64_t k = 0;
  for (int64_t i = 0; i < n; i += PATCH_CHUNK) {
    const int64_t found = loops->methods->patch_diff(fresh + i * size, base + i * size, std::min(PATCH_CHUNK, n - i), size,
                                                     places + k, values + k * size, steps + k * size);
    set(counts, i / PATCH_CHUNK, int32_t(found));
    k += found;
  }
  return k;
}

API void grace_patch_step(const Loops*, uint8_t* x, const int32_t* counts, const uint16_t* places, const uint8_t* steps,
                          uint8_t* values, int64_t chunks, int64_t size) {
  patch_set(x, counts, places, steps, values, chunks, size);
}

API void grace_patch_write(const Loops*, uint8_t* x, const int32_t* counts, const uint16_t* places, const uint8_t* values,
                           int64_t chunks, int64_t size) {
  patch_set(x, counts, places, nullptr, const_cast<uint8_t*>(values), chunks, size);  // which then are only read
}

API int64_t grace_patch_places(const Loops*, const int32_t* counts, const uint16_t* places, uint8_t* out, int64_t chunks) {
  int64_t k = 0;
  uint8_t* to = out;
  for (int64_t chunk = 0; chunk < chunks; chunk++) {
    const int64_t count = get(counts, chunk);
    if (!count) continue;
    const int64_t lower = patch_lower(count), low = (count * lower + 7) / 8;
    const int64_t high = (count + (PATCH_CHUNK >> lower) + 7) / 8;
    uint8_t* const upper = to + low;
    memset(upper, 0, size_t(high));
    uint64_t word = 0;
    int64_t held = 0;
    for (int64_t j = 0; j < count; j++, k++) {
      const uint64_t place = get(places, k);
      const int64_t mark = int64_t(place >> lower) + j;
      upper[mark >> 3] |= uint8_t(1u << (mark & 7));
      word |= (place & ((uint64_t(1) << lower) - 1)) << held;
      held += lower;
      if (held >= 32) {
        const uint32_t part = uint32_t(word);
        memcpy(to, &part, 4);  // little-endian
        to += 4, word >>= 32, held -= 32;
      }
    }
    for (; held > 0; held -= 8, word >>= 8) *to++ = uint8_t(word);
    to = upper + high;
  }
  return to - out;
}

API int64_t grace_patch_unplaces(const Loops*, const int32_t* counts, const uint8_t* sent, uint16_t* places, int64_t chunks,
                                 int64_t n) {
  int64_t k = 0;
  for (int64_t chunk = 0; chunk < chunks; chunk++) {
    const int64_t count = get(counts, chunk);
    if (!count) continue;
    const int64_t lower = patch_lower(count), low = (count * lower + 7) / 8;
    const int64_t marks = count + (PATCH_CHUNK >> lower), high = (marks + 7) / 8;
    const int64_t words = std::min(PATCH_CHUNK, n - chunk * PATCH_CHUNK);
    const uint8_t* const upper = sent + low;
    int64_t j = 0, last = -1, bit = 0;
    for (int64_t first = 0; first < 8 * high; first += 64) {
      uint64_t left = 0;
      memcpy(&left, upper + first / 8, size_t(std::min<int64_t>(8, high - first / 8)));
      for (; left; left &= left - 1, j++, bit += lower) {
        if (j == count) return 0;
        uint32_t part = 0;
        memcpy(&part, sent + bit / 8, size_t(std::min<int64_t>(4, low - bit / 8)));
        const int64_t rest = (part >> (bit & 7)) & ((uint32_t(1) << lower) - 1);
        const int64_t place = ((first + __builtin_ctzll(left) - j) << lower) | rest;
        if (place <= last || place >= words) return 0;
        last = place;
        places[k++] = uint16_t(place);
      }
    }
    if (j != count) return 0;
    sent = upper + high;
  }
  return 1;
}
