// Operators that fill a tensor with a GPU's random numbers, as `random_numbers/operators.py` does, to the bit. Calls
// with other dtypes or layouts, with gaps in memory or with arguments that torch refuses are left to Python, before they
// draw.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>

#include "random_numbers.h"

namespace drawn_tensors {

using at::Tensor;
using c10::IValue;
using Arguments = at::ArrayRef<IValue>;

struct Source {
  uint64_t seed, offset;
  int64_t threads;
};

// Advances a generator by a kernel that makes `count` numbers, so many of each counter. If `of_each_counter` is 0, it
// advances the generator by `count`. None if they are not a GPU's.
using Take = std::function<std::optional<Source>(int64_t count, int of_each_counter)>;

// Fills the argument that is the result. False for a call that is left to Python.
using Fill = bool (*)(Arguments given, const Take& take);

// Whether one kernel fills the memory of a tensor from one end to the other.
inline bool is_one_piece(const Tensor& self) {
  const auto last = (self.numel() - 1) * static_cast<int64_t>(self.itemsize()) + 1;
  return self.numel() > 0 && self.is_non_overlapping_and_dense() && last <= std::numeric_limits<int32_t>::max();
}

inline bool is_half(const Tensor& self) {
  return self.scalar_type() == at::kHalf || self.scalar_type() == at::kBFloat16;
}

inline bool is_float(const Tensor& self) { return self.scalar_type() == at::kFloat; }

// Write numbers of a kind, of which a counter gives four or two.
inline bool write(const char* kind, int of_each_counter, void* out, int64_t count, const Take& take) {
  const auto source = take(count, of_each_counter);
  return source && random_numbers::fill(kind, out, count, source->seed, source->offset, source->threads);
}

// A float32 tensor for the numbers of a tensor of halves; any other tensor itself.
inline Tensor as_computed(const Tensor& self) {
  return is_half(self) ? at::empty({self.numel()}, self.options().dtype(at::kFloat)) : self;
}

// The numbers of halves into the tensor, in the order of memory.
inline void round_into(const Tensor& self, const Tensor& computed) {
  if (!computed.is_same(self)) self.as_strided({self.numel()}, {1}).copy_(computed);
}

inline double rounded(double value, at::ScalarType dtype) {
  const auto narrow = static_cast<float>(value);
  if (dtype == at::kHalf) return static_cast<float>(c10::Half(narrow));
  return dtype == at::kBFloat16 ? static_cast<float>(c10::BFloat16(narrow)) : narrow;
}

// A tensor of float64, whose numbers are multiplied and added by torch, each rounded.
inline bool uniform64(const Tensor& self, double low, double high, const Take& take) {
  if (!write("uniform64", 2, self.data_ptr<double>(), self.numel(), take)) return false;
  if (low != 0 || high != 1) self.mul_(high - low).add_(low);
  self.masked_fill_(self.eq(high), low);
  return true;
}

inline double largest(at::ScalarType dtype) {
  if (dtype == at::kDouble) return DBL_MAX;
  if (dtype == at::kHalf) return std::numeric_limits<c10::Half>::max();
  return dtype == at::kBFloat16 ? static_cast<double>(std::numeric_limits<c10::BFloat16>::max()) : FLT_MAX;
}

inline bool uniform(Arguments given, const Take& take) {
  const Tensor& self = given[0].toTensor();
  const auto low = given[1].toDouble(), high = given[2].toDouble();
  const auto dtype = self.scalar_type();
  const auto most = largest(dtype);
  // Not so for NaN either.
  const bool is_interval = low <= high && low >= -most && high <= most && high - low <= most;
  const bool is_wide = dtype == at::kDouble;
  if (!(is_wide || is_float(self) || is_half(self)) || !is_one_piece(self) || !is_interval) return false;
  if (is_wide) return uniform64(self, low, high, take);
  const auto computed = as_computed(self);
  auto* out = computed.data_ptr<float>();
  const auto start = rounded(low, dtype), end = rounded(high, dtype);
  const auto span = rounded(end - start, dtype);
  const bool is_unit = start == 0 && span == 1;
  const char* kind = is_unit && is_float(self) ? "unit" : "uniform";
  if (!write(kind, 4, out, self.numel(), take)) return false;
  if (!is_unit) {
    // Halves reach their upper end when they are rounded.
    const auto turned = is_float(self) ? static_cast<float>(end) : NAN;
    random_numbers::scale(out, self.numel(), span, start, turned, static_cast<float>(start));
  }
  round_into(self, computed);
  if (is_half(self)) self.masked_fill_(self.eq(end), start);
  return true;
}

inline bool normal(Arguments given, const Take& take) {
  const Tensor& self = given[0].toTensor();
  const auto mean = static_cast<float>(given[1].toDouble()), std = static_cast<float>(given[2].toDouble());
  if (!(is_float(self) || is_half(self)) || !is_one_piece(self) || !(given[2].toDouble() >= 0)) return false;
  const auto computed = as_computed(self);
  auto* out = computed.data_ptr<float>();
  if (!write("normal", 4, out, self.numel(), take)) return false;
  if (mean != 0 || std != 1) random_numbers::scale(out, self.numel(), std, mean, NAN, 0);
  round_into(self, computed);
  return true;
}

inline bool bernoulli(Arguments given, const Take& take) {
  const Tensor& self = given[0].toTensor();
  const auto p = given[1].toDouble();
  const bool is_chance = p >= 0 && p <= 1;
  if (!is_float(self) || !is_one_piece(self) || !is_chance) return false;
  if (!write("uniform", 4, self.data_ptr<float>(), self.numel(), take)) return false;
  self.lt_(static_cast<float>(p));
  return true;
}

// Whether all elements are from 0 to 1.
template <class T>
bool are_chances(const T* chances, int64_t count) {
  bool are = true;
  for (int64_t i = 0; i < count; ++i) are &= chances[i] >= T(0) && chances[i] <= T(1);  // neither holds for NaN
  return are;
}

template <class T>
bool bernoulli_by(const T* chances, T* out, int64_t count, const Take& take) {
  if (!are_chances(chances, count)) return false;
  const auto source = take(10, 0);
  if (!source) return false;
  random_numbers::adjacent(count, source->seed, source->offset, [&](const float* numbers, int64_t start, int64_t size) {
    for (int64_t i = 0; i < size; ++i) out[start + i] = static_cast<T>(numbers[i] <= chances[start + i] ? 1.0f : 0.0f);
  });
  return true;
}

// Of a tensor of chances, with the same dtype and layout.
inline bool bernoulli_of(Arguments given, const Take& take) {
  const Tensor &self = given[0].toTensor(), &chances = given[1].toTensor();
  const bool is_alike = chances.defined() && chances.scalar_type() == self.scalar_type() &&
      chances.sizes() == self.sizes() && chances.strides() == self.strides();
  if (!is_alike || !is_one_piece(self)) return false;
  // Parts of one tensor may overlap.
  if (chances.storage().data() == self.storage().data() && chances.data_ptr() != self.data_ptr()) return false;
  const auto by = [&](auto zero) {
    using T = decltype(zero);
    return bernoulli_by(chances.data_ptr<T>(), self.data_ptr<T>(), self.numel(), take);
  };
  if (self.scalar_type() == at::kDouble) return by(double());
  if (self.scalar_type() == at::kHalf) return by(c10::Half());
  if (self.scalar_type() == at::kBFloat16) return by(c10::BFloat16());
  return is_float(self) && by(float());
}

// Calls a function with a value of a tensor's dtype, of those that integers are drawn in.
template <class F>
bool with_dtype(at::ScalarType dtype, const F& call) {
  switch (dtype) {
    case at::kLong: return call(int64_t());
    case at::kInt: return call(int32_t());
    case at::kShort: return call(int16_t());
    case at::kChar: return call(int8_t());
    case at::kByte: return call(uint8_t());
    case at::kBool: return call(bool());
    case at::kFloat: return call(float());
    case at::kDouble: return call(double());
    case at::kHalf: return call(c10::Half());
    case at::kBFloat16: return call(c10::BFloat16());
    default: return false;
  }
}

// The integers from 0, or of floating point to both sides of 0, that a dtype has without gaps: the last one.
template <class T>
int64_t last_integer() {
  using Limits = std::numeric_limits<T>;
  return Limits::is_integer ? static_cast<int64_t>(Limits::max()) : int64_t{1} << Limits::digits;
}

// `low` and so many integers from it on; 0 for 2 ** 64.
inline bool integers(const Tensor& self, int64_t low, uint64_t span, bool in_pairs, const Take& take) {
  const auto count = self.numel();
  const auto width = static_cast<int64_t>(self.itemsize()), needed = int64_t{in_pairs ? 8 : 4};
  // Words are made in the memory of the integers where they fit, narrower ones than these in its upper half.
  const auto room = width < needed ? at::empty({count}, self.options().dtype(in_pairs ? at::kLong : at::kInt)) : self;
  auto* words = static_cast<uint32_t*>(room.data_ptr()) + (width > needed ? count : 0);
  if (!write(in_pairs ? "pairs" : "words", in_pairs ? 2 : 4, words, count, take)) return false;
  if (is_half(self)) {
    // Torch rounds several numbers at a time.
    const auto computed = as_computed(self);
    random_numbers::to_integers(words, in_pairs, count, low, span, computed.data_ptr<float>());
    round_into(self, computed);
    return true;
  }
  return with_dtype(self.scalar_type(), [&](auto zero) {
    random_numbers::to_integers(words, in_pairs, count, low, span, static_cast<decltype(zero)*>(self.data_ptr()));
    return true;
  });
}

inline bool random(Arguments given, const Take& take) {
  const Tensor& self = given[0].toTensor();
  if (!is_one_piece(self)) return false;
  return with_dtype(self.scalar_type(), [&](auto zero) {
    const auto last = static_cast<uint64_t>(last_integer<decltype(zero)>());
    return integers(self, 0, last + 1, self.itemsize() == 8, take);
  });
}

inline bool random_between(const Tensor& self, int64_t low, int64_t high, const Take& take) {
  if (!is_one_piece(self) || low >= high) return false;
  return with_dtype(self.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const auto last = last_integer<T>();
    const auto first = std::numeric_limits<T>::is_integer ? static_cast<int64_t>(std::numeric_limits<T>::lowest()) : -last;
    if (low < first || high - 1 > last) return false;
    const auto span = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
    return integers(self, low, span, span >= 1 << 28, take);
  });
}

inline bool random_from(Arguments given, const Take& take) {
  if (given[2].isNone()) return false;
  return random_between(given[0].toTensor(), given[1].toInt(), given[2].toInt(), take);
}

inline bool random_to(Arguments given, const Take& take) {
  return random_between(given[0].toTensor(), 0, given[1].toInt(), take);
}

// The bits of the keys of a permutation, of which few are equal (`randperm_out_cuda`).
inline int bits_of_keys(int64_t count) {
  const auto n = static_cast<double>(count);
  return static_cast<int>(std::min(64.0, std::ceil(std::log2(n - (6 * n * n + 1) / (std::log(0.9) * 12)))));
}

// A key, and the place that it came from.
struct Placed {
  uint64_t value, from;
  uint64_t key() const { return value; }
  int64_t place() const { return static_cast<int64_t>(from); }
};

// Both in one number.
template <int BITS>
struct Joined {
  uint64_t both;
  uint64_t key() const { return both >> BITS; }
  int64_t place() const { return static_cast<int64_t>(both & ((uint64_t{1} << BITS) - 1)); }
};

// The order of random keys, of which equal ones are shuffled. `make` makes an entry of a key and its place.
template <class Entry, class Make>
bool permute(const Tensor& out, int64_t count, int bits, const Take& take, const Make& make) {
  const std::unique_ptr<Entry[]> entries(new Entry[count]), spare(new Entry[count]);
  auto* words = reinterpret_cast<uint64_t*>(spare.get());
  if (!write("pairs", 2, words, count, take)) return false;
  const auto shuffled = take(count, 0);
  if (!shuffled) return false;
  random_numbers::to_keys(words, count, bits);
  auto* found = random_numbers::sort_by_key(words, entries.get(), spare.get(), count, bits, make);
  if (out.numel() != count) out.resize_({count});
  const bool is_integer = out.scalar_type() == at::kLong || out.scalar_type() == at::kInt;
  const Tensor whole = is_integer ? out : at::empty({count}, at::kLong);
  const auto finish = [&](auto* places) {
    if (!random_numbers::finish_order(found, count, places)) return;
    for (int64_t start = 0, end = 1; start < count; start = end++) {
      while (end < count && found[end].key() == found[start].key()) ++end;
      random_numbers::shuffle(places + start, end - start, shuffled->seed, shuffled->offset, start);
    }
  };
  if (whole.scalar_type() == at::kLong) {
    finish(whole.data_ptr<int64_t>());
  } else {
    finish(whole.data_ptr<int32_t>());
  }
  if (!is_integer) out.copy_(whole);
  return true;
}

// The largest number of a dtype for which a permutation is made here: floating point has gaps above it.
inline int64_t most_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kLong: return std::numeric_limits<int64_t>::max();
    case at::kInt: return std::numeric_limits<int32_t>::max();
    case at::kShort: return std::numeric_limits<int16_t>::max();
    case at::kDouble: return int64_t{1} << 53;
    case at::kFloat: return int64_t{1} << 24;
    case at::kHalf: return int64_t{1} << 11;
    case at::kBFloat16: return int64_t{1} << 8;
    default: return 0;
  }
}

// A permutation into an `out` that has the size, or no memory yet.
inline bool permutation(Arguments given, const Take& take) {
  const auto count = given[0].toInt();
  const Tensor& out = given[2].toTensor();
  const bool is_new = out.numel() == 0 && out.storage().nbytes() == 0;
  const bool has_size = out.dim() == 1 && out.numel() == count && out.is_contiguous();
  // Larger ones are drawn in parts.
  const bool is_one_draw = count > 0 && count <= std::numeric_limits<int32_t>::max() / 8;
  if (count > most_of(out.scalar_type()) || !is_one_draw || !(is_new || has_size)) return false;
  const auto bits = bits_of_keys(count);
  constexpr int BITS = 21;
  if (bits + BITS <= 64 && count <= int64_t{1} << BITS) {
    const auto make = [](uint64_t key, uint64_t place) { return Joined<BITS>{key << BITS | place}; };
    return permute<Joined<BITS>>(out, count, bits, take, make);
  }
  return permute<Placed>(out, count, bits, take, [](uint64_t key, uint64_t place) { return Placed{key, place}; });
}

// The function of an operator; null for one whose numbers are made in Python.
inline Fill fill_of(const c10::OperatorName& op) {
  const struct {
    const char *name, *overload;
    Fill fill;
  } known[] = {{"aten::uniform_", "", uniform},
               {"aten::normal_", "", normal},
               {"aten::bernoulli_", "float", bernoulli},
               {"aten::bernoulli_", "Tensor", bernoulli_of},
               {"aten::random_", "", random},
               {"aten::random_", "from", random_from},
               {"aten::random_", "to", random_to},
               {"aten::randperm", "generator_out", permutation}};
  for (auto& each : known) {
    if (op.name == each.name && op.overload_name == each.overload) return each.fill;
  }
  return nullptr;
}

}  // namespace drawn_tensors
