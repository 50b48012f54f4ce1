// The random numbers of NVIDIA's GPUs, as `random_numbers/philox.py` and `elementary.py` make them, to the bit: the same
// operations on floating-point numbers in the same order, so no multiplication may be joined with an addition.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC push_options
#pragma GCC optimize("O3", "fp-contract=off")
#endif

// Loops that the compiler turns into vector instructions, those of the processor that runs them.
#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__)
#define OPTIMIZED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define OPTIMIZED
#endif
#define WITHIN __attribute__((always_inline)) inline

namespace random_numbers {

constexpr int CHUNK = 1024;  // threads whose words are made at a time
constexpr int ROUNDS = 10;
constexpr uint32_t FIRST = 0xD2511F53, SECOND = 0xCD9E8D57, WEYL[2] = {0x9E3779B9, 0xBB67AE85};

// The words of threads that follow each other, each in the lower half of 64 bits.
struct Words {
  alignas(64) uint64_t of[4][CHUNK];
};

struct Counter {
  uint64_t seed, number, thread;  // the thread is the first of several
};

template <int USED>
void words_of(Words& out, const Counter& at, int count) {
  for (int i = 0; i < count; ++i) {
    uint32_t c[4] = {static_cast<uint32_t>(at.number), static_cast<uint32_t>(at.number >> 32),
                     static_cast<uint32_t>(at.thread + i), static_cast<uint32_t>((at.thread + i) >> 32)};
    uint32_t key[2] = {static_cast<uint32_t>(at.seed), static_cast<uint32_t>(at.seed >> 32)};
    for (int round = 0; round < ROUNDS; ++round) {
      const uint64_t one = static_cast<uint64_t>(c[0]) * FIRST, other = static_cast<uint64_t>(c[2]) * SECOND;
      c[0] = static_cast<uint32_t>(other >> 32) ^ c[1] ^ key[0];
      c[2] = static_cast<uint32_t>(one >> 32) ^ c[3] ^ key[1];
      c[1] = static_cast<uint32_t>(other);
      c[3] = static_cast<uint32_t>(one);
      for (int half = 0; half < 2; ++half) key[half] += WEYL[half];
    }
    for (int word = 0; word < USED; ++word) out.of[word][i] = c[word];
  }
}

// The same with vectors of 64-bit lanes. The upper halves of words are left as they come: a product reads lower halves.
// Several vectors are computed together, because each round waits for the one before.
#define WORDS_BY_VECTORS(NAME, TARGET, VECTOR, LANES, TOGETHER, PREFIX, BITS)                                          \
  template <int USED>                                                                                                  \
  __attribute__((target(TARGET))) void NAME(Words& out, const Counter& at, int count) {                                \
    const VECTOR first = PREFIX##_set1_epi64##BITS(FIRST), second = PREFIX##_set1_epi64##BITS(SECOND);                 \
    for (int start = 0; start < count; start += LANES * TOGETHER) {                                                    \
      VECTOR c[4][TOGETHER];                                                                                           \
      uint32_t key[2] = {static_cast<uint32_t>(at.seed), static_cast<uint32_t>(at.seed >> 32)};                        \
      for (int each = 0; each < TOGETHER; ++each) {                                                                    \
        alignas(64) uint64_t thread[LANES];                                                                            \
        for (int lane = 0; lane < LANES; ++lane) thread[lane] = at.thread + start + each * LANES + lane;               \
        c[2][each] = PREFIX##_load_si##BITS##_(thread);                                                                \
        c[3][each] = PREFIX##_srli_epi64(c[2][each], 32);                                                              \
        c[0][each] = PREFIX##_set1_epi64##BITS(at.number & 0xFFFFFFFF);                                                \
        c[1][each] = PREFIX##_set1_epi64##BITS(at.number >> 32);                                                       \
      }                                                                                                                \
      for (int round = 0; round < ROUNDS; ++round) {                                                                   \
        const VECTOR low = PREFIX##_set1_epi64##BITS(key[0]), high = PREFIX##_set1_epi64##BITS(key[1]);                \
        for (int each = 0; each < TOGETHER; ++each) {                                                                  \
          const VECTOR one = PREFIX##_mul_epu32(c[0][each], first), other = PREFIX##_mul_epu32(c[2][each], second);    \
          c[0][each] = PREFIX##_xor_of_(PREFIX##_srli_epi64(other, 32), c[1][each], low);                              \
          c[2][each] = PREFIX##_xor_of_(PREFIX##_srli_epi64(one, 32), c[3][each], high);                               \
          c[1][each] = other;                                                                                          \
          c[3][each] = one;                                                                                            \
        }                                                                                                              \
        for (int half = 0; half < 2; ++half) key[half] += WEYL[half];                                                  \
      }                                                                                                                \
      for (int word = 0; word < USED; ++word) {                                                                        \
        for (int each = 0; each < TOGETHER; ++each) {                                                                  \
          PREFIX##_store_(&out.of[word][start + each * LANES], c[word][each]);                                         \
        }                                                                                                              \
      }                                                                                                                \
    }                                                                                                                  \
  }

#if defined(__x86_64__)
#define _mm256_set1_epi64256(value) _mm256_set1_epi64x(static_cast<int64_t>(value))
#define _mm256_load_si256_(from) _mm256_load_si256(reinterpret_cast<const __m256i*>(from))
#define _mm256_store_(to, value) _mm256_store_si256(reinterpret_cast<__m256i*>(to), value)
#define _mm256_xor_of_(one, other, third) _mm256_xor_si256(_mm256_xor_si256(one, other), third)
#define _mm512_set1_epi64512(value) _mm512_set1_epi64(static_cast<int64_t>(value))
#define _mm512_load_si512_(from) _mm512_load_si512(from)
#define _mm512_store_(to, value) _mm512_store_si512(to, value)
#define _mm512_xor_of_(one, other, third) _mm512_ternarylogic_epi64(one, other, third, 0x96)
WORDS_BY_VECTORS(words_by_avx2, "avx2", __m256i, 4, 2, _mm256, 256)
WORDS_BY_VECTORS(words_by_avx512, "avx512f", __m512i, 8, 4, _mm512, 512)
#endif

using Maker = void (*)(Words&, const Counter&, int);

// Makes the first words of each thread, so many of the four.
template <int USED>
Maker fastest() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return words_by_avx512<USED>;
  if (__builtin_cpu_supports("avx2")) return words_by_avx2<USED>;
#endif
  return words_of<USED>;
}

WITHIN float as_float(uint32_t bits) {
  float found;
  std::memcpy(&found, &bits, sizeof found);
  return found;
}

WITHIN uint32_t as_bits(float value) {
  uint32_t found;
  std::memcpy(&found, &value, sizeof found);
  return found;
}

WITHIN float uniform_of(uint64_t word) {
  return static_cast<float>(static_cast<uint32_t>(word)) * 0x1p-32f + 0x1p-33f;
}

WITHIN float logarithm(float x) {
  const uint32_t bits = as_bits(x);
  float exponent = static_cast<float>(static_cast<int32_t>(bits >> 23) - 126);
  float mantissa = as_float((bits & 0x7FFFFF) | 0x3F000000);
  const bool is_low = mantissa < 0.70710677f;
  exponent -= is_low ? 1.0f : 0.0f;
  mantissa += is_low ? mantissa : 0.0f;
  mantissa -= 1.0f;
  const float square = mantissa * mantissa;
  constexpr float COEFFICIENTS[] = {7.0376836292e-2,  -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1,
                                    1.4249322787e-1,  -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1,
                                    3.3333331174e-1};
  float found = mantissa * COEFFICIENTS[0];
  for (int i = 1; i < 8; ++i) {
    found += COEFFICIENTS[i];
    found *= mantissa;
  }
  found += COEFFICIENTS[8];
  found *= mantissa;
  found *= square;
  found += exponent * -2.12194440e-4f;
  found -= square * 0.5f;
  found += mantissa;
  found += exponent * 0.693359375f;
  return found;
}

OPTIMIZED inline void to_words(const uint64_t* from, int count, uint32_t* to) {
  for (int i = 0; i < count; ++i) to[i] = static_cast<uint32_t>(from[i]);
}

OPTIMIZED inline void to_pairs(const uint64_t* high, const uint64_t* low, int count, uint64_t* to) {
  for (int i = 0; i < count; ++i) to[i] = high[i] << 32 | (low[i] & 0xFFFFFFFF);
}

OPTIMIZED inline void to_uniform(const uint64_t* from, int count, float* to) {
  for (int i = 0; i < count; ++i) to[i] = uniform_of(from[i]);
}

OPTIMIZED inline void to_uniform(const uint32_t* from, int count, float* to) {
  for (int i = 0; i < count; ++i) to[i] = uniform_of(from[i]);
}

// Numbers in [0, 1).
OPTIMIZED inline void to_unit(const uint64_t* from, int count, float* to) {
  for (int i = 0; i < count; ++i) {
    const float found = uniform_of(from[i]);
    to[i] = found == 1.0f ? 0.0f : found;
  }
}

OPTIMIZED inline void to_uniform64(const uint64_t* low, const uint64_t* high, int count, double* to) {
  for (int i = 0; i < count; ++i) {
    const uint64_t bits = (low[i] & 0xFFFFFFFF) ^ (high[i] & 0xFFFFFFFF) << 21;
    to[i] = static_cast<double>(static_cast<int64_t>(bits)) * 0x1p-53 + 0x1p-54;
  }
}

// Radius times sine, and times cosine, of two words.
OPTIMIZED inline void to_normal(const uint64_t* first, const uint64_t* second, int count, float* sines, float* cosines) {
  constexpr float TURN = 6.2831855f, TO_ANGLE = 0x1p-32f * TURN, HALF_ANGLE = 0x1p-33f * TURN;
  for (int i = 0; i < count; ++i) {
    const float radius = __builtin_sqrtf(logarithm(uniform_of(first[i])) * -2.0f);
    const double turned = static_cast<double>(static_cast<float>(static_cast<uint32_t>(second[i])));
    const float x = static_cast<float>(turned * static_cast<double>(TO_ANGLE) + static_cast<double>(HALF_ANGLE));
    const int32_t octant = (static_cast<int32_t>(x * 1.2732395f) + 1) & -2;
    const float eighths = static_cast<float>(octant);
    float rest = x - eighths * 0.78515625f;
    rest -= eighths * 2.4187564849853515625e-4f;
    rest -= eighths * 3.77489497744594108e-8f;
    const float square = rest * rest;
    float sine = square * -1.9515295891e-4f;
    sine += 8.3321608736e-3f;
    sine *= square;
    sine += -1.6666654611e-1f;
    sine *= square;
    sine *= rest;
    sine += rest;
    float cosine = square * 2.443315711809948e-5f;
    cosine += -1.388731625493765e-3f;
    cosine *= square;
    cosine += 4.166664568298827e-2f;
    cosine *= square;
    cosine *= square;
    cosine -= square * 0.5f;
    cosine += 1.0f;
    const uint32_t quadrant = static_cast<uint32_t>(octant) >> 1;
    const bool is_odd = (quadrant & 1) != 0;
    sines[i] = as_float(as_bits(is_odd ? cosine : sine) ^ (quadrant & 2) << 30) * radius;
    cosines[i] = as_float(as_bits(is_odd ? sine : cosine) ^ ((quadrant + 1) & 2) << 30) * radius;
  }
}

// Where the numbers of a call of some threads go: `unroll` places of the tensor, each with so many numbers.
template <class T>
struct Places {
  T* at[4];
  int count[4];
};

inline void put(const Words& words, const Places<uint32_t>& to) {
  for (int i = 0; i < 4; ++i) to_words(words.of[i], to.count[i], to.at[i]);
}

inline void put(const Words& words, const Places<uint64_t>& to) {
  for (int i = 0; i < 2; ++i) to_pairs(words.of[2 * i], words.of[2 * i + 1], to.count[i], to.at[i]);
}

inline void put(const Words& words, const Places<double>& to) {
  for (int i = 0; i < 2; ++i) to_uniform64(words.of[2 * i], words.of[2 * i + 1], to.count[i], to.at[i]);
}

inline void put_uniform(const Words& words, const Places<float>& to) {
  for (int i = 0; i < 4; ++i) to_uniform(words.of[i], to.count[i], to.at[i]);
}

inline void put_unit(const Words& words, const Places<float>& to) {
  for (int i = 0; i < 4; ++i) to_unit(words.of[i], to.count[i], to.at[i]);
}

inline void put_normal(const Words& words, const Places<float>& to) {
  float spare[CHUNK];
  for (int i = 0; i < 4; i += 2) {
    // The second of a pair may lie beyond the end, in part or wholly.
    const bool is_whole = to.count[i + 1] == to.count[i];
    float* second = is_whole ? to.at[i + 1] : spare;
    to_normal(words.of[i], words.of[i + 1], to.count[i], to.at[i], second);
    if (!is_whole) std::copy(spare, spare + to.count[i + 1], to.at[i + 1]);
  }
}

template <int UNROLL, class T, class Put>
void fill(T* out, int64_t size, uint64_t seed, uint64_t offset, int64_t threads, const Put& put) {
  static const Maker make_all = fastest<4>(), make_half = fastest<2>();
  Words words;
  uint64_t number = offset / 4;
  for (int64_t start = 0; start < size; start += threads * UNROLL, ++number) {
    // The other two words are for the second half of the places.
    const auto make = start + threads * (UNROLL / 2) < size ? make_all : make_half;
    const int64_t used = std::min(threads, size - start);
    for (int64_t thread = 0; thread < used; thread += CHUNK) {
      const int count = static_cast<int>(std::min<int64_t>(CHUNK, used - thread));
      make(words, {seed, number, static_cast<uint64_t>(thread)}, count);
      Places<T> places{};
      for (int i = 0; i < UNROLL; ++i) {
        const int64_t place = start + i * threads + thread;
        places.count[i] = static_cast<int>(std::clamp<int64_t>(size - place, 0, count));
        places.at[i] = out + std::min(place, size);
      }
      put(words, places);
    }
  }
}

// Write the numbers of a kind into memory. False for a kind that only Python makes.
inline bool fill(const std::string& kind, void* out, int64_t size, uint64_t seed, uint64_t offset, int64_t threads) {
  const auto plain = [](const Words& words, const auto& places) { put(words, places); };
  if (kind == "words") {
    fill<4>(static_cast<uint32_t*>(out), size, seed, offset, threads, plain);
  } else if (kind == "pairs") {
    fill<2>(static_cast<uint64_t*>(out), size, seed, offset, threads, plain);
  } else if (kind == "uniform") {
    fill<4>(static_cast<float*>(out), size, seed, offset, threads, put_uniform);
  } else if (kind == "unit") {
    fill<4>(static_cast<float*>(out), size, seed, offset, threads, put_unit);
  } else if (kind == "uniform64") {
    fill<2>(static_cast<double*>(out), size, seed, offset, threads, plain);
  } else if (kind == "normal") {
    fill<4>(static_cast<float*>(out), size, seed, offset, threads, put_normal);
  } else {
    return false;
  }
  return true;
}

// Multiply and add in place, rounding once, and turn `end` to `start`.
OPTIMIZED inline void scale(float* at, int64_t size, double factor, double summand, float end, float start) {
  for (int64_t i = 0; i < size; ++i) {
    const float found = static_cast<float>(static_cast<double>(at[i]) * factor + summand);
    at[i] = found == end ? start : found;
  }
}

// The remainders of words of 32 bits, in the elements of a block, where `inverse` is 2 ** 64 / divisor, rounded up. The
// lower 64 bits of a word's product with it are the fraction of the quotient (Lemire, Kaser and Kurz, "Faster remainder
// by direct computation", 2019). Factors of 32 bits are what vector instructions multiply.
OPTIMIZED inline void to_remainders(uint64_t* block, int64_t size, uint32_t divisor, uint64_t inverse) {
  constexpr uint64_t LOW = 0xFFFFFFFF;
  const uint64_t inverse_low = inverse & LOW, inverse_high = inverse >> 32;
  for (int64_t i = 0; i < size; ++i) {
    const uint64_t word = block[i] & LOW;
    const uint64_t fraction = inverse_low * word + ((inverse_high * word) << 32);
    const uint64_t high = (fraction >> 32) * divisor, low = (fraction & LOW) * divisor;
    block[i] = (high + (low >> 32)) >> 32;
  }
}

// Calls a function with the uniform numbers of each thread's first counter, four for adjacent elements.
template <class Put>
void adjacent(int64_t size, uint64_t seed, uint64_t offset, const Put& put) {
  static const Maker make = fastest<4>();
  Words words;
  uint32_t together[4 * CHUNK];
  float numbers[4 * CHUNK];
  for (int64_t start = 0; start < size; start += 4 * CHUNK) {
    const auto of_chunk = std::min<int64_t>(4 * CHUNK, size - start);
    const auto count = static_cast<int>((of_chunk + 3) / 4);
    make(words, {seed, offset / 4, static_cast<uint64_t>(start / 4)}, count);
    for (int i = 0; i < count; ++i) {
      for (int word = 0; word < 4; ++word) together[4 * i + word] = static_cast<uint32_t>(words.of[word][i]);
    }
    to_uniform(together, 4 * count, numbers);
    put(numbers, start, of_chunk);
  }
}

// Reduce each number of 64 bits modulo 2 ** 32 - 1 (modulo 2 ** 64 - 1 for more than 32 bits) and keep its low `bits`
// bits, as the integers that a GPU draws for keys.
OPTIMIZED inline void to_keys(uint64_t* words, int64_t count, int bits) {
  constexpr uint64_t LOW = 0xFFFFFFFF;
  const uint64_t mask = bits == 64 ? UINT64_MAX : (uint64_t{1} << bits) - 1;
  if (bits > 32) {
    for (int64_t i = 0; i < count; ++i) words[i] = words[i] == UINT64_MAX ? 0 : words[i] & mask;
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t sum = (words[i] >> 32) + (words[i] & LOW);
    const uint64_t rest = (sum >> 32) + (sum & LOW);
    words[i] = rest == LOW ? 0 : rest & mask;
  }
}

constexpr int MOST_BITS = 11;  // of a digit

// Sort entries of keys by digits of so many bits, from the lowest bit on, equal ones by their order. The entries are in
// one of the two arrays then; the keys may lie in the second one's memory.
template <int DIGITS, class Entry, class Make>
Entry* sort_by_digits(
    const uint64_t* keys, Entry* entries, Entry* spare, int64_t count, int lowest, int width, const Make& make) {
  const uint64_t mask = (uint64_t{1} << width) - 1;
  uint32_t places[DIGITS][1 << MOST_BITS] = {};
  for (int64_t i = 0; i < count; ++i) {
    for (int digit = 0; digit < DIGITS; ++digit) ++places[digit][keys[i] >> (lowest + digit * width) & mask];
  }
  for (auto& of_digit : places) {
    uint32_t place = 0;
    for (uint64_t value = 0; value <= mask; ++value) place += std::exchange(of_digit[value], place);
  }
  for (int64_t i = 0; i < count; ++i) {
    entries[places[0][keys[i] >> lowest & mask]++] = make(keys[i], static_cast<uint64_t>(i));
  }
  for (int digit = 1; digit < DIGITS; ++digit) {
    const int shift = lowest + digit * width;
    for (int64_t i = 0; i < count; ++i) spare[places[digit][entries[i].key() >> shift & mask]++] = entries[i];
    std::swap(entries, spare);
  }
  return entries;
}

// The same for random keys of so many bits, by their upper bits, which few entries share.
template <class Entry, class Make>
Entry* sort_by_key(const uint64_t* keys, Entry* entries, Entry* spare, int64_t count, int bits, const Make& make) {
  int needed = 2;  // bits, at most 30 as entries are fewer than 2 ** 28
  while (int64_t{1} << (needed - 2) < count) ++needed;
  const int digits = (needed + MOST_BITS - 1) / MOST_BITS;
  const int width = std::min(MOST_BITS, (std::min(bits, needed + 4) + digits - 1) / digits);
  const int lowest = std::max(0, bits - digits * width);
  if (digits == 1) return sort_by_digits<1>(keys, entries, spare, count, lowest, width, make);
  if (digits == 2) return sort_by_digits<2>(keys, entries, spare, count, lowest, width, make);
  return sort_by_digits<3>(keys, entries, spare, count, lowest, width, make);
}

// Sort entries whose upper bits are in order, and write the places that they came from. Return whether some keys are
// equal.
template <class Entry, class T>
bool finish_order(Entry* entries, int64_t count, T* places) {
  bool has_equal = false;
  uint64_t most = entries[0].key();
  places[0] = static_cast<T>(entries[0].place());
  for (int64_t i = 1; i < count; ++i) {
    const auto entry = entries[i];
    places[i] = static_cast<T>(entry.place());
    if (entry.key() > most) {
      most = entry.key();
      continue;
    }
    int64_t to = i;
    for (; to > 0 && entries[to - 1].key() > entry.key(); --to) {
      entries[to] = entries[to - 1];
      places[to] = places[to - 1];
    }
    entries[to] = entry;
    places[to] = static_cast<T>(entry.place());
    has_equal |= to > 0 && entries[to - 1].key() == entry.key();
  }
  return has_equal;
}

// Shuffle the places of equal keys by the words of a thread.
template <class T>
void shuffle(T* places, int64_t count, uint64_t seed, uint64_t offset, int64_t thread) {
  if (count < 2) return;
  static const Maker make = fastest<4>();
  Words words;
  for (int64_t step = 0, last = count - 1; last > 0; ++step, --last) {
    if (step % 4 == 0) make(words, {seed, offset / 4 + step / 4, static_cast<uint64_t>(thread)}, 1);
    const auto other = static_cast<uint32_t>(words.of[step % 4][0]) % static_cast<uint32_t>(last + 1);
    std::swap(places[last], places[other]);
  }
}

// An integer with a sign in a dtype that has it.
template <class T>
WITHIN T from_integer(uint64_t bits) {
  const auto value = static_cast<int64_t>(bits);
  // Those of float32 and halves have 25 bits, and vector instructions convert 32.
  if constexpr (std::is_same_v<T, float> || !std::is_arithmetic_v<T>) {
    return static_cast<T>(static_cast<float>(static_cast<int32_t>(value)));
  } else {
    return static_cast<T>(value);
  }
}

// The remainders of words of 32 bits, or of pairs of them, by `span`, from `low` on; a span of 0 is 2 ** 64. The words
// may lie in the memory of the integers, in its upper half, so each block of them is read first.
template <class T>
void to_integers(const void* words, bool in_pairs, int64_t count, int64_t low, uint64_t span, T* out) {
  constexpr int64_t BLOCK = 256;
  const size_t width = in_pairs ? sizeof(uint64_t) : sizeof(uint32_t);
  const bool masks = (span & (span - 1)) == 0;
  const auto divisor = static_cast<uint32_t>(span);
  // Of words, whose spans are below 2 ** 28; that of pairs may have no low bits to divide by.
  const uint64_t inverse = masks || in_pairs ? 0 : UINT64_MAX / divisor + 1;
  uint32_t narrow[BLOCK];
  uint64_t block[BLOCK];
  for (int64_t start = 0; start < count; start += BLOCK) {
    const auto size = std::min(BLOCK, count - start);
    const auto* from = static_cast<const char*>(words) + start * width;
    std::memcpy(in_pairs ? static_cast<void*>(block) : narrow, from, size * width);
    if (!in_pairs) std::copy(narrow, narrow + size, block);
    if (masks) {
      for (int64_t i = 0; i < size; ++i) block[i] &= span - 1;
    } else if (in_pairs) {
      for (int64_t i = 0; i < size; ++i) block[i] %= span;
    } else {
      to_remainders(block, size, divisor, inverse);
    }
    for (int64_t i = 0; i < size; ++i) out[start + i] = from_integer<T>(block[i] + static_cast<uint64_t>(low));
  }
}

}  // namespace random_numbers

#if !defined(__clang__)
#pragma GCC pop_options
#endif
