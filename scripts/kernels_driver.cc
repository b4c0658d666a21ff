// Calls every kernel on generated data and prints a digest of each result, for comparisons with other compilers and
// machines (compare_kernels.py), and for sanitizers (sanitize_kernels.py). Argument: the instruction set of the linked
// loops.
//
// Arrays have the sizes that api.h says, no element more, so that a sanitizer finds an access beyond them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "api.h"
#include "kernels.h"

namespace {

using Bytes = std::vector<uint8_t>;
using Floats = std::vector<float>;
using Ints = std::vector<int32_t>;
using Longs = std::vector<int64_t>;

const grace::Loops* loops;
int64_t threads = 1;

Floats numbers(int64_t n, uint32_t seed) {  // values of many magnitudes and both signs, the same on every machine
  Ints words(static_cast<size_t>(n));
  grace_words(loops, seed, 1, 0, n, words.data(), threads);
  Floats found;
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
void tell(const std::string& name, int64_t a, int64_t b, const T&... values) {
  printf("%s %lld %lld", name.c_str(), static_cast<long long>(a), static_cast<long long>(b));
  const int unused[] = {(printf(" %016llx", static_cast<unsigned long long>(digest(values))), 0)...};
  (void)unused;
  printf("\n");
}

void sums(const char* name, int64_t a, int64_t b, const Floats& values) {  // prints sums of values whose last bits may differ
  double total = 0, size = 0;
  for (float value : values) total += value, size += std::fabs(value);
  printf("%s %lld %lld %.4e %.4e\n", name, static_cast<long long>(a), static_cast<long long>(b), total, size);
}

int64_t packed(int64_t bits, int64_t n) { return 8 % bits ? (n + 7) / 8 * bits : (n * bits + 7) / 8; }
int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }

std::vector<uint16_t> noise(int64_t key, int64_t n) {
  std::vector<uint16_t> table(static_cast<size_t>(n));
  grace_noise_table(loops, key, 6, n, table.data());
  return table;
}

// Calls every kernel of blocks on a vector of n elements; with `swap`, x takes the old residual.
void blocks(int64_t n, int64_t block, int64_t swap) {
  const auto x0 = numbers(n, 2), r0 = numbers(n, 3);
  const auto table = noise(5, 65536), offsets = noise(7, parts(n, 65536));
  const auto size = [](int64_t count) { return static_cast<size_t>(count); };
  const int64_t m = block ? parts(n, block) : 1;
  Floats x, residual, mean(size(n));
  const auto fresh = [&] { x = x0, residual = r0; };
  const int64_t b = block + swap;

  Bytes bits(size(packed(1, n)));
  Floats scales(size(m)), means(size(2 * m));
  const uint8_t* sent[] = {bits.data(), bits.data()};
  const float *scaled[] = {scales.data(), scales.data()}, *halves[] = {means.data(), means.data()};
  fresh();
  grace_efsignsgd_encode(loops, x.data(), residual.data(), residual.data(), bits.data(), scales.data(), n, block,
                         threads, swap);
  grace_efsignsgd_mean(loops, sent, scaled, 2, mean.data(), n, block, threads);
  tell("efsignsgd", n, b, x, residual, bits, scales, mean);
  grace_efsignsgd_encode(loops, x.data(), nullptr, nullptr, bits.data(), scales.data(), n, block, threads, 0);
  tell("efsignsgd alone", n, b, bits, scales);
  fresh();
  grace_onebit_encode(loops, x.data(), residual.data(), residual.data(), bits.data(), means.data(), n, block, threads, swap);
  grace_onebit_mean(loops, sent, halves, 2, mean.data(), n, block, threads);
  tell("onebit", n, b, x, residual, bits, means, mean);

  for (int64_t width : {8, 4, 2}) {
    for (bool random : {false, true}) {
      Bytes codes(size(packed(width, n)));
      const uint8_t* all[] = {codes.data(), codes.data()};
      fresh();
      grace_blockint_encode(loops, x.data(), residual.data(), residual.data(), codes.data(), scales.data(), n, block, width,
                            random ? table.data() : nullptr, random ? offsets.data() : nullptr, 0, threads, swap);
      grace_blockint_mean(loops, all, scaled, 2, mean.data(), n, block, width, threads);
      tell("blockint", n, b * 100 + width * 10 + random, x, residual, codes, scales, mean);
    }
  }
  for (int64_t width : {2, 3, 5, 8}) {
    const int64_t levels = width == 2 ? 0 : (int64_t(1) << (width - 1)) - 1;
    Bytes codes(size(packed(width, n)));
    const uint8_t* all[] = {codes.data(), codes.data()};
    fresh();
    grace_qsgd_encode(loops, x.data(), residual.data(), residual.data(), codes.data(), scales.data(), n, block, width,
                      levels, levels ? table.data() : nullptr, levels ? offsets.data() : nullptr, 0, 11, 12, threads,
                      swap);
    grace_qsgd_mean(loops, all, scaled, 2, mean.data(), n, block, width, levels, threads);
    tell("qsgd", n, b * 10 + width, x, residual, codes, scales, mean);
  }
  const int64_t forty = block ? parts(block, 40) * 40 : 0;
  for (int64_t runs : {0, 1}) {
    Bytes bytes(size(parts(n, 5)));
    Floats few(size(forty ? parts(n, forty) : 1));
    fresh();
    const int64_t count = grace_threelc_encode(loops, x.data(), residual.data(), residual.data(), bytes.data(),
                                               few.data(), n, forty, 1.5f, runs, threads);
    bytes.resize(size(count)), bytes.shrink_to_fit();
    const uint8_t* all[] = {bytes.data(), bytes.data()};
    const float* those[] = {few.data(), few.data()};
    const int64_t counts[] = {count, count};
    const int64_t wrong = grace_threelc_mean(loops, all, those, counts, 2, mean.data(), n, forty, runs, threads);
    tell("threelc", n, b * 10 + runs, x, residual, bytes, few, mean, Longs{wrong});
  }
  Floats table16(16);
  for (int i = 0; i < 16; i++) table16[size_t(i)] = float(i - 8) / 8;
  std::vector<uint32_t> buckets(2 * grace::BUCKETS, 8u << 16);
  for (int32_t kind : {grace::BF16, grace::FP8, grace::NATURAL, grace::DITHERED, grace::NEAREST}) {
    for (int32_t random : {0, 1}) {
      if (kind == grace::NEAREST ? random : kind == grace::DITHERED && !random) continue;  // skip unused combinations
      const int32_t widths[] = {16, 8, 8, 5, 4}, width = widths[kind];
      grace::Codec codec = {};
      codec.kind = kind, codec.bits = width, codec.random = random, codec.factor = 1, codec.key0 = 21, codec.key1 = 22;
      codec.first = kind == grace::DITHERED ? 15 : 3, codec.second = kind == grace::FP8 ? 7 : 0, codec.top = 126;
      codec.table = kind == grace::NEAREST ? table16.data() : nullptr, codec.buckets = buckets.data();
      codec.noise = {random && kind == grace::FP8 ? table.data() : nullptr, offsets.data(), 0, 0};
      Floats values(256);
      if (kind != grace::NEAREST) {
        for (int i = 0; i < 256; i++) values[size_t(i)] = std::ldexp(1.0f, i % 32 - 16);
        codec.table = values.data();
      }
      Bytes codes(size(width == 16 ? 2 * n : packed(width, n)));
      Ints those(size(m));
      const uint8_t* all[] = {codes.data(), codes.data()};
      const int32_t* scale[] = {those.data(), those.data()};
      int32_t* const to = kind == grace::BF16 ? nullptr : those.data();
      fresh();
      grace_codes_encode(loops, &codec, x.data(), residual.data(), residual.data(), codes.data(), to, n, block, 0, threads);
      grace_codes_mean(loops, &codec, all, to ? scale : nullptr, 2, mean.data(), n, block, threads);
      tell("codes", n, b * 100 + kind * 10 + random, x, residual, codes, those, mean);
    }
  }
}

// Calls the kernels of randomly rotated blocks.
void rotated(int64_t n, int64_t width, int64_t swap) {
  const auto size = [](int64_t count) { return static_cast<size_t>(count); };
  const int64_t m = parts(n, width);
  const auto table = noise(5, 65536), offsets = noise(7, parts(m * width, 65536));
  auto x = numbers(n, 2), residual = numbers(n, 3);
  Floats mean(size(n)), rest(size(n));
  for (int64_t bits : {1, 3, 4}) {
    Floats levels, middles;
    for (int i = 0; i < 1 << bits; i++) levels.push_back(float(i) - float((1 << bits) - 1) / 2);
    for (size_t i = 1; i < levels.size(); i++) middles.push_back((levels[i - 1] + levels[i]) / 2);
    Bytes codes(size(packed(bits, m * width))), streams(size(m));
    Floats scales(size(m));
    const uint8_t *all[] = {codes.data(), codes.data()}, *signs[] = {streams.data(), streams.data()};
    const float* scaled[] = {scales.data(), scales.data()};
    grace_eden_encode(loops, x.data(), residual.data(), residual.data(), codes.data(), scales.data(), streams.data(), n,
                      width, bits, levels.data(), middles.data(), bits == 3 ? 0.0f : float(width), 3, 31, 32, 0, threads,
                      swap);
    grace_eden_mean(loops, all, scaled, signs, 2, mean.data(), n, width, bits, levels.data(), 31, 32, 0, threads);
    tell("eden", n, width * 100 + bits * 10 + swap, x, residual, codes, scales, streams, mean);
  }
  Floats norms(size(m));
  grace_thc_norms(loops, x.data(), norms.data(), n, width, threads);
  for (int64_t wide : {0, 1}) {
    Bytes codes(size(m * width * (wide ? 4 : 1)));
    grace_thc_encode(loops, x.data(), norms.data(), codes.data(), n, width, 15, wide, 3.0f, 2.5f, table.data(),
                     offsets.data(), 41, 42, 0, threads);
    grace_thc_values(loops, nullptr, codes.data(), norms.data(), mean.data(), n, width, wide, 3.0f, 0.4f, 41, 42, 0, threads);
    grace_thc_values(loops, x.data(), codes.data(), norms.data(), rest.data(), n, width, wide, 3.0f, 0.4f, 41, 42, 0, threads);
    tell("thc", n, width * 10 + wide, norms, codes, mean, rest);
  }
}

// Calls the kernels of methods that send few elements of a vector.
void sparse(int64_t n, int64_t swap) {
  const auto size = [](int64_t count) { return static_cast<size_t>(count); };
  const auto x0 = numbers(n, 2), r0 = numbers(n, 3);
  auto x = x0, residual = r0;
  const int64_t k = n / 50 + 1;
  Floats values(size(k)), mean(size(n));
  Ints positions(size(k)), chosen(size(k));
  const float* sent[] = {values.data(), values.data()};
  const int32_t* places[] = {positions.data(), positions.data()};
  const int64_t counts[] = {k, k};
  grace_topk_encode(loops, x.data(), residual.data(), residual.data(), values.data(), positions.data(), n, k, threads, swap);
  tell("topk", n, k, x, residual, values, positions);
  grace_sparse_mean(loops, sent, places, counts, 2, mean.data(), n, threads);
  tell("sparse mean", n, k, mean);
  const float two[] = {0.25f, -0.75f};
  Ints marked = positions;
  for (size_t i = 0; i < marked.size(); i += 2) marked[i] = -1 - marked[i];
  const float* pair[] = {two, two};
  const int32_t* where[] = {positions.data(), marked.data()};
  const int64_t wrong = grace_adaq_mean(loops, pair, where, counts, 2, mean.data(), n, threads);
  tell("adaq mean", n, k, mean, Longs{wrong});

  const int64_t lower = 3, marks = k + (n >> lower) + 1;
  Bytes plane(size(packed(lower, k))), upper(size(packed(1, marks)));
  uint8_t* planes[] = {plane.data()};
  const int64_t written = grace_positions_write(loops, positions.data(), k, lower, planes, upper.data(), marks);
  const int64_t read = grace_positions_read(loops, planes, upper.data(), marks, k, lower, chosen.data());
  tell("positions", n, k, plane, upper, chosen, Longs{written, read});

  for (const int64_t bytes : {1, 2, 4, 8}) {
    const int64_t many = n * 4 / bytes, chunks = parts(many, 65536);
    Bytes fresh(size(4 * n)), old(size(4 * n));
    memcpy(fresh.data(), x0.data(), fresh.size());
    memcpy(old.data(), x0.data(), old.size());
    for (size_t i = 0; i < old.size(); i += 37) old[i] = uint8_t(old[i] + i);
    Ints counts_of(size(chunks));
    std::vector<uint16_t> places(size(many)), back(size(many));
    Bytes values(size(many * bytes)), steps(size(many * bytes)), code(size(many * 2 + chunks * 16400));
    const int64_t changed = grace_patch_diff(loops, fresh.data(), old.data(), counts_of.data(), places.data(),
                                             values.data(), steps.data(), many, bytes);
    const int64_t coded = grace_patch_places(loops, counts_of.data(), places.data(), code.data(), chunks);
    code.resize(size(coded));
    const int64_t valid = grace_patch_unplaces(loops, counts_of.data(), code.data(), back.data(), chunks, many);
    grace_patch_step(loops, old.data(), counts_of.data(), places.data(), steps.data(), values.data(), chunks, bytes);
    grace_patch_write(loops, fresh.data(), counts_of.data(), places.data(), values.data(), chunks, bytes);
    values.resize(size(changed * bytes)), steps.resize(size(changed * bytes));
    places.resize(size(changed)), back.resize(size(changed));
    Bytes flat(size((changed + 1) / 2)), large(steps.size()), again(steps.size());
    const int64_t beyond = grace_patch_nibbles(loops, steps.data(), flat.data(), large.data(), changed, bytes);
    large.resize(size(beyond * bytes));
    grace_patch_unnibbles(loops, flat.data(), large.data(), again.data(), changed, beyond, bytes);
    tell("patch", n, bytes, counts_of, code, values, flat, large, Longs{again == steps, changed, valid, old == fresh, places == back});
  }

  for (float bound : {0.25f, 1e-6f}) {
    const int64_t room = n / 2 + 1;
    Floats found(size(room));
    Ints at(size(room));
    Floats out = x0;
    int64_t count = grace_threshold_encode(loops, x0.data(), r0.data(), out.data(), bound, found.data(), at.data(), room, n,
                                           threads);
    if (count <= room) found.resize(size(count)), at.resize(size(count)), tell("threshold", n, count, out, found, at);
    found.assign(size(room), 0), at.assign(size(room), 0);
    count = grace_beyond(loops, x0.data(), bound, found.data(), at.data(), room, n, threads);
    if (count <= room) found.resize(size(count)), at.resize(size(count)), tell("beyond", n, count, found, at);
    std::vector<double> excess(3);
    grace_excess(loops, x0.data(), bound, excess.data(), n, threads);
    tell("excess", n, count, excess);
  }
  const Floats factors = {0.5f, 1.0f, 2.0f}, miss = {1.0f, 0.0f, 1.0f};
  Floats found(size(n));
  Ints at(size(n));
  for (int64_t first : {0, 1}) {
    const int64_t count = grace_sampled(loops, x0.data(), n, 51, 52, 0, std::min<int64_t>(n, 100), 5, factors.data(),
                                        miss.data(), 3, first, k, n, found.data(), at.data(), n, threads);
    const auto many = size(std::max<int64_t>(count, 0));
    tell("sampled", n, count, Floats(found.begin(), found.begin() + int64_t(many)),
         Ints(at.begin(), at.begin() + int64_t(many)));
  }
  grace_smallest_words(loops, 53, 54, 0, n, k, chosen.data(), threads);
  tell("smallest words", n, k, chosen);

  Longs signs(3);
  Floats left = x0, means(2);
  residual = r0;
  grace_adaq_count(loops, x0.data(), residual.data(), left.data(), signs.data(), n, threads);
  int64_t room = n / 10 + 2;
  Ints few(size(room));
  int64_t count = grace_adaq_encode(loops, left.data(), signs.data(), 0.05, means.data(), few.data(), left.data(), room, n);
  few.resize(size(std::min(count, room)));
  tell("adaq", n, count, signs, means, few, left);

  for (int64_t chunk : {64, 512}) {
    const int64_t each = 8, full = n / chunk, all = full * each + std::min(n % chunk, each), m = parts(n, chunk);
    Bytes low(size(all)), high(size(packed(1, all))), codes(size(packed(2, all)));
    Floats magnitudes(size(2 * m)), sent_values(size(all));
    Ints sent_places(size(all));
    x = x0, residual = r0;
    uint8_t* const above = chunk > 256 ? high.data() : nullptr;
    grace_chunktopk_encode(loops, x.data(), residual.data(), residual.data(), low.data(), above, codes.data(),
                           magnitudes.data(), n, chunk, each, threads);
    const int64_t beyond = grace_chunktopk_values(loops, low.data(), above, codes.data(), magnitudes.data(), n, chunk, each,
                                                  sent_values.data(), sent_places.data());
    tell("chunktopk", n, chunk, x, residual, low, high, codes, magnitudes, sent_values, sent_places, Longs{beyond});
  }
}

// Calls the other kernels that encode a vector.
void methods(int64_t n) {
  const auto size = [](int64_t count) { return static_cast<size_t>(count); };
  const auto x = numbers(n, 2), residual = numbers(n, 3);
  Floats mean(size(n)), left(size(n));
  Bytes bits(size(packed(1, n))), flags(size(parts(n, 8192)));
  const uint8_t *sent[] = {bits.data(), bits.data()}, *flagged[] = {flags.data(), flags.data()};
  grace_signsgd_encode(loops, x.data(), bits.data(), flags.data(), n, threads);
  grace_signsgd_mean(loops, sent, flagged, 2, mean.data(), n, threads);
  tell("signsgd", n, 0, bits, flags, mean);

  for (int64_t width : {1, 4, 8}) {
    const int64_t q = std::min(n, int64_t(1) << width);
    Bytes codes(size(packed(width, n)));
    Floats means(size(q));
    const uint8_t* all[] = {codes.data(), codes.data()};
    const float* those[] = {means.data(), means.data()};
    grace_sketch_encode(loops, x.data(), codes.data(), means.data(), n, q, width, threads);
    grace_sketch_mean(loops, all, those, 2, mean.data(), n, q, width, threads);
    tell("sketch", n, width, codes, means, mean);
  }
  Longs starts(size(3 * (parts(n, 65536) + 1)));
  grace_inceptionn_count(loops, x.data(), starts.data(), n, -14, -6, threads);
  const Longs counts(starts.end() - 3, starts.end());
  Bytes tags(size(parts(n, 4))), two(size(2 * counts[1])), one(size(counts[2]));
  Floats three(size(counts[0]));
  grace_inceptionn_encode(loops, x.data(), starts.data(), tags.data(), three.data(), two.data(), one.data(), n, -14,
                          -6, threads);
  const uint8_t *tags_of[] = {tags.data()}, *two_of[] = {two.data()}, *one_of[] = {one.data()};
  const float* three_of[] = {three.data()};
  int64_t wrong = grace_inceptionn_mean(loops, tags_of, three_of, two_of, one_of, counts.data(), 1, mean.data(), n, -14, -6,
                                        threads);
  tell("inceptionn", n, 0, starts, tags, three, two, one, mean, Longs{wrong});

  const auto random = noise(5, 65536), offsets = noise(7, parts(n, 65536));
  const int64_t block = 512;
  const Floats scales(size(parts(n, block)), 0.5f);
  for (int64_t wide : {0, 1}) {
    Bytes codes(size(n * (wide ? 4 : 1)));
    grace_shared_int_encode(loops, x.data(), scales.data(), codes.data(), n, block, 31, wide, random.data(),
                            offsets.data(), 0,
                            threads);
    grace_shared_int_values(loops, nullptr, codes.data(), scales.data(), mean.data(), n, block, 31, wide, threads);
    grace_shared_int_values(loops, x.data(), codes.data(), scales.data(), left.data(), n, block, 31, wide, threads);
    tell("shared_int", n, wide, codes, mean, left);
  }
  const float* vectors[] = {x.data(), residual.data()};
  const int64_t lengths[] = {n, n};
  tell("finite", n, 0, Longs{grace_finite(loops, vectors, lengths, 2)});
}

void matrix(int64_t a, int64_t b, int64_t r) {
  auto m = numbers(a * b, 7);
  const auto p = numbers(a * r, 8), q = numbers(r * b, 9), residual = numbers(a * b, 10);
  Floats out(size_t(a * b)), left(size_t(a * r)), right(size_t(r * b));
  grace_lowrank_product(loops, m.data(), p.data(), q.data(), out.data(), a, b, r, threads);
  tell("lowrank product", a * 10000 + b, r, out);
  grace_lowrank_left(loops, m.data(), residual.data(), q.data(), left.data(), a, b, r, threads);
  sums("lowrank left", a * 10000 + b, r, left);
  tell("compensated", a * 10000 + b, r, m);
  grace_lowrank_right(loops, m.data(), p.data(), right.data(), a, b, r, threads);
  sums("lowrank right", a * 10000 + b, r, right);
  grace_lowrank_part(loops, m.data(), p.data(), q.data(), out.data(), a, b, r, threads);
  tell("lowrank part", a * 10000 + b, r, m, out);
  Ints places(size_t(a) * size_t(std::min<int64_t>(b, 3)));
  grace_topk_rows(loops, m.data(), a, b, std::min<int64_t>(b, 3), places.data(), threads);
  tell("topk rows", a * 10000 + b, r, places);
}

// Calls the kernels of cosine transforms. Coefficients depend on the instruction set in their last bits, and so may
// their selection.
void cosines(int64_t a, int64_t b, int64_t rows, int64_t columns, int64_t k) {
  const int64_t m = parts(a, rows) * parts(b, columns), over = rows * columns > 256;
  auto x = numbers(a * b, 7), residual = numbers(a * b, 8);
  const auto before = x;
  int bits = 0;
  while ((int64_t(256) << bits) < rows * columns) bits++;
  Floats values(size_t(m * k)), mean(size_t(a * b));
  Bytes low(size_t(m * k)), high(over ? size_t(packed(bits, m * k)) : 0);
  uint8_t* const above = over ? high.data() : nullptr;
  grace_demo_encode(loops, x.data(), residual.data(), residual.data(), values.data(), low.data(), above, a, b, rows,
                    columns, k, threads);
  const float* sent[] = {values.data(), values.data()};
  const uint8_t *lows[] = {low.data(), low.data()}, *highs[] = {above, above};
  const int64_t wrong = grace_demo_mean(loops, sent, lows, over ? highs : nullptr, 2, mean.data(), a, b, rows, columns, k,
                                        0, 0, threads);
  const int64_t other = grace_demo_left(loops, before.data(), values.data(), low.data(), above, x.data(), a, b, rows,
                                        columns, k, threads);
  sums("demo mean", a * 10000 + b, k, mean);
  tell("demo", a * 10000 + b, k, Longs{wrong, other});
}

}  // namespace

#define NUMBER(name) NUMBER_##name,
enum { GRACE_KERNELS(NUMBER) };
#undef NUMBER

void rows(int64_t n) {
  const Longs stems = {1, 2, 3};
  const int64_t many = int64_t(stems.size());
  Longs key0(stems.size()), key1(stems.size()), results(stems.size()), words;
  grace_stream_keys(loops, stems.data(), many, 5, 1, key0.data(), key1.data());
  std::vector<Ints> outs(stems.size(), Ints(static_cast<size_t>(n)));
  for (size_t i = 0; i < stems.size(); i++) {
    for (int64_t word : {key0[i], key1[i], int64_t(7), n, int64_t(reinterpret_cast<intptr_t>(outs[i].data())), threads})
      words.push_back(word);
  }
  grace_rows(loops, NUMBER_words, words.data(), 6, many, results.data(), threads);
  tell("rows", n, 0, outs[0], outs[1], outs[2], results);
}

int main(int count, char** argv) {
  if (!grace_supports(count > 1 ? argv[1] : "scalar")) return 2;
  loops = grace_loops();
  fprintf(stderr, "%s\n", grace_name(loops));
  tell("noise", 0, 0, noise(5, 65536));
  grace_stream_from(4097);  // streaming stores, as for large vectors
  for (int64_t n : {1, 7, 16, 100, 513, 4099, 70001, 300000}) {
    threads = n == 300000 ? 2 : 1;
    for (int64_t block : {0, 8, 512})
      if (n >= block) blocks(n, block, block == 512);
    for (int64_t width : {8, 64, 1024}) rotated(n, width, width == 64);
    sparse(n, n % 2);
    methods(n);
    rows(n);
    grace_gathered(loops, n < 20000 ? 10000000 : 0);
  }
  for (int64_t a : {1, 5, 64, 333})
    for (int64_t b : {1, 31, 64, 1100})
      for (int64_t r : {1, 2, 4, 9}) matrix(a, b, r);
  for (int64_t a : {1, 64, 130}) cosines(a, 96, std::min<int64_t>(a, 64), 64, 8), cosines(a, 33, std::min<int64_t>(a, 8), 8, 4);
}
