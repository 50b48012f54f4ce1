// Operators that fill a tensor with a GPU's random numbers, as `random_numbers/operators.py` does, to the bit. Calls
// with other dtypes, with gaps in memory or with arguments that torch refuses are left to Python, before they draw.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
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

// Moves a generator on by a kernel that makes so many numbers, so many of each counter. None if they are not a GPU's.
using Take = std::function<std::optional<Source>(int64_t count, int of_each_counter)>;

// Fills the first argument. False for a call that is left to Python.
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

// `low` and so many integers from it on; 0 for 2 ** 64.
inline bool integers(const Tensor& self, int64_t low, uint64_t span, bool in_pairs, const Take& take) {
  const bool is_wide = self.scalar_type() == at::kLong;
  const auto count = self.numel();
  // The words of a wide tensor are made in the upper half of its memory, those of others in place.
  const auto room = in_pairs && !is_wide ? at::empty({count}, self.options().dtype(at::kLong)) : self;
  auto* words = static_cast<uint32_t*>(room.data_ptr()) + (is_wide && !in_pairs ? count : 0);
  if (!write(in_pairs ? "pairs" : "words", in_pairs ? 2 : 4, words, count, take)) return false;
  if (is_wide) {
    random_numbers::to_integers(words, in_pairs, count, low, span, self.data_ptr<int64_t>());
  } else {
    random_numbers::to_integers(words, in_pairs, count, low, span, self.data_ptr<int32_t>());
  }
  return true;
}

inline bool takes_integers(const Tensor& self) {
  return (self.scalar_type() == at::kLong || self.scalar_type() == at::kInt) && is_one_piece(self);
}

inline bool random(Arguments given, const Take& take) {
  const Tensor& self = given[0].toTensor();
  if (!takes_integers(self)) return false;
  const bool is_wide = self.scalar_type() == at::kLong;
  return integers(self, 0, is_wide ? uint64_t{1} << 63 : uint64_t{1} << 31, is_wide, take);
}

inline bool random_between(const Tensor& self, int64_t low, int64_t high, const Take& take) {
  if (!takes_integers(self) || low >= high) return false;
  using Narrow = std::numeric_limits<int32_t>;
  const bool fits = self.scalar_type() == at::kLong || (low >= Narrow::min() && high - 1 <= Narrow::max());
  if (!fits) return false;
  const auto span = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
  return integers(self, low, span, span >= 1 << 28, take);
}

inline bool random_from(Arguments given, const Take& take) {
  if (given[2].isNone()) return false;
  return random_between(given[0].toTensor(), given[1].toInt(), given[2].toInt(), take);
}

inline bool random_to(Arguments given, const Take& take) {
  return random_between(given[0].toTensor(), 0, given[1].toInt(), take);
}

// The function of an operator; null for one whose numbers are made in Python.
inline Fill fill_of(const c10::OperatorName& op) {
  const struct {
    const char *name, *overload;
    Fill fill;
  } known[] = {{"aten::uniform_", "", uniform},         {"aten::normal_", "", normal},
               {"aten::bernoulli_", "float", bernoulli}, {"aten::random_", "", random},
               {"aten::random_", "from", random_from},   {"aten::random_", "to", random_to}};
  for (auto& each : known) {
    if (op.name == each.name && op.overload_name == each.overload) return each.fill;
  }
  return nullptr;
}

}  // namespace drawn_tensors
