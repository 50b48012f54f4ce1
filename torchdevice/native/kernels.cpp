// The kernels, the storages and the allocator of simulated devices in C++, for contexts whose policy asks nothing.
//
// A storage of a device has the memory of a CPU storage, its twin, which it keeps. A kernel gives the CPU kernel
// tensors with the twins of its arguments, and relabels the results in place. A call that it cannot serve exactly goes
// to the kernel in Python that was registered before it, with the same arguments. All kernels are put in place at once.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/pybind.h>

#include "drawn_tensors.h"
#include "random_numbers.h"

// Up to torch 2.12 tensors may have names.
#if __has_include(<ATen/core/NamedTensor.h>)
#include <ATen/core/NamedTensor.h>
#define HAS_NAMES
#endif

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using c10::StorageImpl;
using c10::TensorImpl;
using torch::jit::Stack;

constexpr auto OWN = DeviceType::PrivateUse1;

// What Python answers (`answers` of `serving.py`). Never released, since C++ may ask until the process ends.
PyObject* answers = nullptr;

// Ask Python, and throw its error. The caller holds Python's lock.
template <class... Args>
py::object asked(const char* name, Args&&... args) {
  py::tuple given = py::make_tuple(std::forward<Args>(args)...);
  auto function = py::reinterpret_steal<py::object>(PyObject_GetAttrString(answers, name));
  PyObject* result = PyObject_CallObject(function.ptr(), given.ptr());
  if (result == nullptr) throw python_error();
  return py::reinterpret_steal<py::object>(result);
}

// ---- the caching allocator -------------------------------------------------------------------------------------------
//
// The same as `allocator/block_allocation.py` with default settings, without private pools, observers and blocks that
// another stream may use. In all other cases, and near the limit, the model in Python leads.

constexpr int64_t MINIMUM = 512, SMALL = 1 << 20, SMALL_SEGMENT = 2 << 20, LARGE_SEGMENT = 20 << 20;
constexpr int64_t OWN_SEGMENT = 10 << 20, LARGE_UNIT = 2 << 20;
constexpr int64_t UNKNOWN = -2, NO_LIMIT = -1;

enum Stat { ALLOCATED, REQUESTED, COUNT, INACTIVE, INACTIVE_COUNT, RESERVED, SEGMENTS, STATS };

struct Figures {
  int64_t current[STATS] = {}, peak[STATS] = {}, total[STATS] = {};

  void change(Stat stat, int64_t by) {
    current[stat] += by;
    if (by > 0) {
      total[stat] += by;
      peak[stat] = std::max(peak[stat], current[stat]);
    }
  }
};

struct Memory;
struct Block;

// The end of memory, among the ends of storages of Python.
struct End {
  int64_t ledger, number;
};

struct Pool {
  int64_t stream;
  bool is_small;
  // The free blocks by size and address.
  std::map<std::pair<int64_t, int64_t>, Block*> free;
};

struct Block {
  int64_t address, size, requested;
  Pool* pool;
  Block *previous = nullptr, *next = nullptr;
  Memory* owner = nullptr;  // null for a free block
  int64_t number = 0, values = 0;  // of the owner, which may have ended where the model in Python leads

  bool is_split() const { return previous != nullptr || next != nullptr; }
};

int64_t rounded(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

int64_t segment_size(int64_t size) {
  return size <= SMALL ? SMALL_SEGMENT : size < OWN_SEGMENT ? LARGE_SEGMENT : rounded(size, LARGE_UNIT);
}

// The blocks of one device.
struct Ledger : std::enable_shared_from_this<Ledger> {
  const int64_t number;
  const int8_t index;
  std::mutex mutex;
  bool leads = false;  // else the model in Python does, and the blocks here are those of the moment when it began
  Figures whole, parts[2];  // of the large and of the small pools
  std::map<std::pair<int64_t, bool>, Pool> pools;
  std::map<int64_t, Block*> heads;  // address -> the first block of each segment
  int64_t first = 0, end = 0, obtained = 0;
  std::unordered_map<int64_t, Memory*> owners;  // by number, of those that have not ended; while the model leads
  // The memory of free blocks by their addresses, each with the number of its end: see `kept_memory.py`.
  std::map<int64_t, std::pair<int64_t, c10::intrusive_ptr<StorageImpl>>> kept;
  // The memory that ended while the model in Python leads, by number.
  std::unordered_map<int64_t, c10::intrusive_ptr<StorageImpl>> ending;
  int64_t freed = 0;

  Ledger(int64_t number, int8_t index) : number(number), index(index) {}

  ~Ledger() { clear(); }

  void clear() {
    for (auto& [_, head] : heads) {
      for (Block* each = head; each != nullptr;) {
        delete std::exchange(each, each->next);
      }
    }
    heads.clear();
    pools.clear();
  }

  Pool& pool(int64_t stream, bool is_small) {
    auto [found, is_new] = pools.try_emplace({stream, is_small});
    if (is_new) {
      found->second.stream = stream;
      found->second.is_small = is_small;
    }
    return found->second;
  }

  void change(const Pool& pool, Stat stat, int64_t by) {
    parts[pool.is_small].change(stat, by);
    whole.change(stat, by);
  }

  void split(const Pool& pool, int64_t count, int64_t size) {
    change(pool, INACTIVE_COUNT, count);
    change(pool, INACTIVE, size);
  }

  // Return a block; null where a new segment is needed and `limit` does not allow it, or is unknown.
  Block* allocate(int64_t requested, int64_t stream, int64_t limit) {
    const auto size = rounded(requested, MINIMUM);
    Pool& from = pool(stream, size <= SMALL);
    auto fitting = from.free.lower_bound({size, 0});
    Block* block = nullptr;
    if (fitting != from.free.end()) {
      block = fitting->second;
      from.free.erase(fitting);
    } else {
      const auto wanted = segment_size(size);
      if (limit == UNKNOWN || (limit != NO_LIMIT && whole.current[RESERVED] + wanted > limit)) return nullptr;
      if (heads.empty()) {
        end = first;
      }
      block = new Block{end, wanted, 0, &from};
      heads[end] = block;
      end += wanted;
      ++obtained;
      change(from, RESERVED, wanted);
      change(from, SEGMENTS, 1);
    }
    const auto rest = block->size - size;
    const bool was_split = block->is_split();
    if (rest > 0 && (from.is_small || rest > SMALL)) {
      auto* after = new Block{block->address + size, rest, 0, &from, block, block->next};
      if (after->next != nullptr) {
        after->next->previous = after;
      }
      block->next = after;
      block->size = size;
      from.free.emplace(std::pair(after->size, after->address), after);
      was_split ? split(from, 0, -size) : split(from, 1, rest);
    } else if (was_split) {
      split(from, -1, -block->size);
    }
    block->requested = requested;
    change(from, ALLOCATED, block->size);
    change(from, REQUESTED, requested);
    change(from, COUNT, 1);
    return block;
  }

  void free(Block* block) {
    Pool& to = *block->pool;
    change(to, ALLOCATED, -block->size);
    change(to, REQUESTED, -block->requested);
    change(to, COUNT, -1);
    block->owner = nullptr;
    int64_t count = 0, inactive = 0;
    if (Block* after = block->next; after != nullptr && after->owner == nullptr) {
      to.free.erase({after->size, after->address});
      count -= 1;
      inactive -= after->size;
      join(block, after);
    }
    if (Block* before = block->previous; before != nullptr && before->owner == nullptr) {
      to.free.erase({before->size, before->address});
      count -= 1;
      inactive -= before->size;
      join(before, block);
      block = before;
    }
    to.free.emplace(std::pair(block->size, block->address), block);
    if (block->is_split()) {
      count += 1;
      inactive += block->size;
    }
    split(to, count, inactive);
  }

  static void join(Block* one, Block* other) {
    one->size += other->size;
    one->next = other->next;
    if (other->next != nullptr) {
      other->next->previous = one;
    }
    delete other;
  }

  // Give memory a block. Return false where only Python can.
  bool take(Memory& memory, int64_t requested, int64_t stream);

  // Let memory have a block of the model in Python, which leads.
  void own(Memory& memory);

  // Take the block of memory that ends.
  void release(Memory& memory);

  // Keep the memory of a block that is freed. Return what is given up for it, to be freed without the lock.
  std::vector<c10::intrusive_ptr<StorageImpl>> keep(const Memory& memory);

  // What is kept, which the caller has from now on; what the caller kept; and what an end left, or None.
  py::dict take_kept();
  void give_kept(const py::dict& given);
  py::object take_ended(int64_t of);

  py::tuple freeze();
  bool lead(py::dict of_device, const py::tuple& state);
};

// What a storage of a device keeps.
struct Memory {
  inline static std::atomic<int64_t> last{0};
  const int64_t number = ++last;  // not the address, which another memory has before Python has heard of the end
  c10::intrusive_ptr<StorageImpl> twin;
  void* data;  // of the twin; a storage that has other memory now is not served here
  std::shared_ptr<Ledger> ledger;  // null without a block
  Block* block = nullptr;  // while the ledger leads
  bool is_foreign = false;
  bool is_known = false;  // whether the program has read the address
  size_t movable = 0;  // the bytes that may move to the memory that was kept for the block; 0 if they must stay
};

void hold(Block* block, Memory& memory) {
  memory.block = block;
  block->owner = &memory;
  block->number = memory.number;
  block->values = reinterpret_cast<int64_t>(memory.data);
}

// Let memory be what was kept for its block, if it fits. The caller copies the values. Return false where there is another
// user, which may be a reference of Python's to the storage that ended.
bool use_kept(Ledger& ledger, Memory& memory, const Block& block) {
  auto found = ledger.kept.find(block.address);
  if (memory.movable == 0 || found == ledger.kept.end()) return true;
  auto& twin = found->second.second;
  if (twin->nbytes() < memory.movable) return true;
  if (twin.use_count() != 1) return false;
  memory.twin = std::move(twin);
  memory.data = memory.twin->mutable_data();
  memory.is_known = true;
  ledger.kept.erase(found);
  return true;
}

constexpr size_t MOST_KEPT = 256, MOST_KEPT_BYTES = 64 << 20;

std::vector<c10::intrusive_ptr<StorageImpl>> Ledger::keep(const Memory& memory) {
  std::vector<c10::intrusive_ptr<StorageImpl>> given_up;
  auto& [when, twin] = kept[memory.block->address];
  if (twin) {
    given_up.push_back(std::move(twin));
  }
  twin = memory.twin;
  when = ++freed;
  size_t bytes = 0;
  for (auto& [_, each] : kept) {
    bytes += each.second->nbytes();
  }
  while (kept.size() > MOST_KEPT || bytes > MOST_KEPT_BYTES) {
    auto oldest = std::min_element(
        kept.begin(), kept.end(), [](auto& one, auto& other) { return one.second.first < other.second.first; });
    bytes -= oldest->second.second->nbytes();
    given_up.push_back(std::move(oldest->second.second));
    kept.erase(oldest);
  }
  return given_up;
}

bool Ledger::take(Memory& memory, int64_t requested, int64_t stream) {
  int64_t limit = UNKNOWN;
  for (;;) {
    {
      std::lock_guard<std::mutex> guard(mutex);
      if (Block* block = leads ? allocate(requested, stream, limit) : nullptr; block != nullptr) {
        const bool is_settled = kept.empty() || use_kept(*this, memory, *block);
        hold(block, memory);
        memory.ledger = shared_from_this();
        if (is_settled) return true;
        break;
      }
      if (!leads || limit != UNKNOWN) return false;
    }
    py::gil_scoped_acquire gil;
    limit = asked("limit", number).cast<int64_t>();
  }
  {
    py::gil_scoped_acquire gil;
    asked("settled", number);
  }
  std::lock_guard<std::mutex> guard(mutex);
  if (leads) {
    use_kept(*this, memory, *memory.block);
    hold(memory.block, memory);
  }
  return true;
}

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

void Ledger::own(Memory& memory) {
  memory.ledger = shared_from_this();
  std::lock_guard<std::mutex> guard(mutex);
  owners[memory.number] = &memory;
}

void Ledger::release(Memory& memory) {
  std::vector<c10::intrusive_ptr<StorageImpl>> given_up;
  {
    std::lock_guard<std::mutex> guard(mutex);
    if (leads) {
      if (memory.is_known) {
        given_up = keep(memory);
      }
      return free(memory.block);
    }
    owners.erase(memory.number);
    if (memory.is_known) {
      ending[memory.number] = memory.twin;
    }
  }
  // Storages of Python end too, and all are freed in one order. Torch drops tensors without Python's lock.
  if (Py_IsInitialized() && !is_finalizing()) {
    py::gil_scoped_acquire gil;
    py::error_scope pending;
    asked("ended", End{number, memory.number});  // without a step of Python, in which an interrupt could come
  }
}

py::list shown(const Figures& figures) {
  py::list found;
  for (const auto* of : {figures.current, figures.peak, figures.total}) {
    for (int stat = 0; stat < STATS; ++stat) {
      found.append(of[stat]);
    }
  }
  return found;
}

void read(Figures& figures, const std::vector<int64_t>& from) {
  size_t at = 0;
  for (auto* of : {figures.current, figures.peak, figures.total}) {
    for (int stat = 0; stat < STATS; ++stat) {
      of[stat] = from.at(at++);
    }
  }
}

// Let the model in Python lead, and return what it needs. May be called again.
py::tuple Ledger::freeze() {
  {
    py::gil_scoped_release no_gil;
    std::lock_guard<std::mutex> guard(mutex);
    for (auto& [_, head] : heads) {
      for (Block* each = leads ? head : nullptr; each != nullptr; each = each->next) {
        if (each->owner != nullptr) owners[each->number] = each->owner;
      }
    }
    leads = false;
  }
  // From here on nobody changes the blocks.
  py::list segments;
  for (auto& [_, head] : heads) {
    py::list blocks;
    for (Block* each = head; each != nullptr; each = each->next) {
      const int64_t number = each->owner == nullptr ? 0 : each->number;
      blocks.append(py::make_tuple(each->address, each->size, each->requested, number, each->values));
    }
    segments.append(py::make_tuple(head->pool->stream, head->pool->is_small, blocks));
  }
  return py::make_tuple(end, obtained, py::make_tuple(shown(whole), shown(parts[1]), shown(parts[0])), segments);
}

py::dict Ledger::take_kept() {
  decltype(kept) taken;
  {
    std::lock_guard<std::mutex> guard(mutex);
    kept.swap(taken);
  }
  py::dict found;
  for (auto& [address, each] : taken) {
    auto* storage = torch::createPyObject(c10::Storage(each.second));
    found[py::int_(address)] = py::reinterpret_steal<py::object>(storage);
  }
  return found;
}

void Ledger::give_kept(const py::dict& given) {
  decltype(kept) taken;
  for (auto& [address, storage] : given) {
    auto memory = torch::createStorage(storage.ptr());
    const auto size = memory.nbytes();
    // Only the caller's object and this one have it. That object counts as a user as long as it exists.
    if (memory.use_count() > 2) continue;
    taken[address.cast<int64_t>()] = {
        0, c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), size,
                                            memory.set_data_ptr(at::DataPtr(nullptr, Device(c10::kCPU))), nullptr, false)};
  }
  std::lock_guard<std::mutex> guard(mutex);
  kept.swap(taken);
}

py::object Ledger::take_ended(int64_t of) {
  c10::intrusive_ptr<StorageImpl> found;
  {
    std::lock_guard<std::mutex> guard(mutex);
    if (auto each = ending.find(of); each != ending.end()) {
      found = std::move(each->second);
      ending.erase(each);
    }
  }
  if (!found) return py::none();
  return py::reinterpret_steal<py::object>(torch::createPyObject(c10::Storage(found)));
}

// Lead from now on with the blocks of the model in Python, which the device then lacks. In one step for Python, so that
// an interrupt leaves one of both leading. Return false if memory has ended meanwhile.
bool Ledger::lead(py::dict of_device, const py::tuple& state) {
  // Read before the lock is taken: Python may collect garbage here, and memory that ends takes the lock.
  using Part = std::tuple<int64_t, int64_t, int64_t, int64_t>;
  using Segment = std::tuple<int64_t, bool, std::vector<Part>>;
  const auto segments = state[4].cast<std::vector<Segment>>();
  const auto figures = state[3].cast<std::vector<std::vector<int64_t>>>();
  const auto addresses = std::tuple(state[0].cast<int64_t>(), state[1].cast<int64_t>(), state[2].cast<int64_t>());
  std::lock_guard<std::mutex> guard(mutex);
  if (leads || PyDict_GetItemString(of_device.ptr(), "_blocks") == nullptr) return false;
  for (auto& [_, __, rows] : segments) {
    for (auto& row : rows) {
      if (std::get<3>(row) != 0 && owners.count(std::get<3>(row)) == 0) return false;
    }
  }
  clear();
  std::tie(first, end, obtained) = addresses;
  read(whole, figures[0]);
  read(parts[1], figures[1]);
  read(parts[0], figures[2]);
  for (auto& [stream, is_small, rows] : segments) {
    Pool& in = pool(stream, is_small);
    Block* previous = nullptr;
    for (auto& [address, size, requested, number] : rows) {
      auto* block = new Block{address, size, requested, &in, previous};
      if (number != 0) {
        hold(block, *owners[number]);
      } else {
        in.free.emplace(std::pair(block->size, block->address), block);
      }
      (previous == nullptr ? heads[block->address] : previous->next) = block;
      previous = block;
    }
  }
  owners.clear();
  PyDict_DelItemString(of_device.ptr(), "_blocks");
  leads = true;
  return true;
}

// Ledgers by number, for the fork of a process: no other thread may hold a lock then.
std::mutex all_ledgers_mutex;
std::map<int64_t, std::weak_ptr<Ledger>> all_ledgers;
std::vector<std::shared_ptr<Ledger>> held_for_fork;

void before_fork() {
  all_ledgers_mutex.lock();
  for (auto& [_, each] : all_ledgers) {
    if (auto ledger = each.lock()) {
      ledger->mutex.lock();
      held_for_fork.push_back(std::move(ledger));
    }
  }
}

void after_fork() {
  for (auto& each : held_for_fork) {
    each->mutex.unlock();
  }
  held_for_fork.clear();
  all_ledgers_mutex.unlock();
}

std::shared_ptr<Ledger> new_ledger(int8_t index) {
  static int64_t last = 0;
  std::lock_guard<std::mutex> guard(all_ledgers_mutex);
  for (auto at = all_ledgers.begin(); at != all_ledgers.end();) {
    at = at->second.expired() ? all_ledgers.erase(at) : std::next(at);
  }
  auto made = std::make_shared<Ledger>(++last, index);
  all_ledgers[last] = made;
  return made;
}

// ---- what a thread's scope asks --------------------------------------------------------------------------------------

// Of a call of attention that autograd watches: whether the real device composes it of other operators, and otherwise the
// text with which its kernel refuses gradients of gradients; nothing where it has them.
using Differentiated = std::pair<bool, std::string>;

// The native side of a context.
struct Context {
  std::atomic<bool> serves{false};  // whether the policy asks nothing
  std::atomic<bool> is_initialized{false};  // whether the program has used the accelerator, so that factories may run
  std::atomic<bool> draws_as_gpu{false};  // whether random numbers are a GPU's
  std::shared_ptr<Ledger> ledgers[128];  // of the devices whose memory the context has used
  std::mutex mutex;
  std::map<std::vector<int64_t>, Differentiated> differentiated;  // by what it depends on
};

struct Thread {
  std::shared_ptr<Context> context;
  bool changes_streams = false;  // whether it ever chose another stream than the default one
};

thread_local Thread thread;

Context* serving() {
  auto* context = thread.context.get();
  return context != nullptr && context->serves.load(std::memory_order_relaxed) ? context : nullptr;
}

int64_t current_stream(int8_t index) {
  if (!thread.changes_streams) return 0;
  py::gil_scoped_acquire gil;
  return asked("stream", static_cast<int>(index)).cast<int64_t>();
}

// ---- storages --------------------------------------------------------------------------------------------------------

void give_back(void* context) {
  auto* memory = static_cast<Memory*>(context);
  if (memory->ledger) {
    memory->ledger->release(*memory);
  }
  delete memory;
}

// The memory of a storage; null where Python made the storage, or has given it other memory.
Memory* memory_of(const StorageImpl* storage) {
  if (storage == nullptr || storage->data_ptr().get_deleter() != &give_back) return nullptr;
  auto* memory = static_cast<Memory*>(storage->data_ptr().get_context());
  return memory->is_foreign || memory->data != storage->data() ? nullptr : memory;
}

bool is_plain(const TensorImpl* impl) {
  constexpr DispatchKeySet others(
      {DispatchKey::Sparse, DispatchKey::SparseCsr, DispatchKey::Quantized, DispatchKey::NestedTensor,
       DispatchKey::Python});
  return !impl->key_set().has_any(others) && impl->has_storage();
}

// Whether the kernels here know the memory of a tensor of a device.
Memory* memory_of(const Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
#ifdef HAS_NAMES
  if (at::impl::has_names(impl)) return nullptr;
#endif
  return is_plain(impl)
      ? memory_of(impl->unsafe_storage().unsafeGetStorageImpl())
      : nullptr;
}

// Another tensor with the storage, shape, dtype and bits of a tensor.
Tensor copied(const Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  return Tensor(
      impl->is_inference()
          ? impl->shallow_copy_and_detach(c10::VariableVersion(c10::VariableVersion::DISABLED), true)
          : impl->shallow_copy_and_detach(c10::VariableVersion(0), true));
}

// A CPU tensor with the memory, shape, dtype and bits of a tensor of a device.
Tensor alias_of(const Tensor& tensor, const Memory& memory) {
  auto out = copied(tensor);
  out.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(memory.twin));
  out.unsafeGetTensorImpl()->_change_backend_component_keys(Device(c10::kCPU));
  return out;
}

size_t extent(const TensorImpl* impl) {
  if (impl->numel() == 0) return 0;
  size_t last = 0;
  for (int64_t dim = 0; dim < impl->dim(); ++dim) {
    last += (impl->size(dim) - 1) * impl->stride(dim);
  }
  return (last + 1) * impl->itemsize();
}

// Whether a tensor lies within its storage, which a program may have resized.
bool is_whole(const TensorImpl* impl) {
  return impl->numel() == 0 || impl->storage_offset() * impl->itemsize() + extent(impl) <= impl->unsafe_storage().nbytes();
}

// The storage whose memory begins where a CPU tensor's does, and which no kernel can resize.
c10::intrusive_ptr<StorageImpl> twin_of(const TensorImpl* impl, void* data) {
  auto storage = c10::intrusive_ptr<StorageImpl>::reclaim_copy(impl->unsafe_storage().unsafeGetStorageImpl());
  if (impl->storage_offset() == 0 || data == nullptr) {
    storage->set_resizable(false);
    return storage;
  }
  auto* kept = new c10::intrusive_ptr<StorageImpl>(storage);
  auto release = [](void* each) { delete static_cast<c10::intrusive_ptr<StorageImpl>*>(each); };
  return c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), extent(impl), at::DataPtr(data, kept, release, Device(c10::kCPU)), nullptr, false);
}

// The memory of a storage that has what a CPU tensor has. Null where only Python can give it a block. Of the values so
// many bytes may be moved.
std::unique_ptr<Memory> memory_for(const TensorImpl* impl, Context* context, int8_t index, size_t movable = 0) {
  const auto requested = static_cast<int64_t>(impl->numel() * impl->itemsize());
  auto memory = std::make_unique<Memory>();
  memory->data = requested == 0 ? nullptr : const_cast<void*>(impl->data());
  memory->movable = movable;
  if (context != nullptr && requested != 0) {
    auto& ledger = context->ledgers[index];
    if (!ledger || !ledger->take(*memory, requested, current_stream(index))) return nullptr;
  }
  if (memory->twin) {
    std::memcpy(memory->data, impl->data(), movable);
  } else {
    memory->twin = twin_of(impl, memory->data);
  }
  return memory;
}

at::DataPtr pointer_of(std::unique_ptr<Memory> memory, Device device) {
  auto* data = memory->data;
  return at::DataPtr(data, memory.release(), &give_back, device);
}

// Let a CPU tensor be one of a device, in the same memory; a copy of it where it has other users. Return false where only
// Python can. Without a context the model in Python has its block.
bool relabel(Tensor& tensor, Context* context, int8_t index) {
  if (tensor.use_count() != 1 || tensor.unsafeGetTensorImpl()->is_wrapped_number()) tensor = copied(tensor);
  auto* impl = tensor.unsafeGetTensorImpl();
  auto memory = memory_for(impl, context, index, extent(impl));
  if (!memory) return false;
  const Device device(OWN, index);
  impl->set_storage_keep_dtype(c10::Storage(c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), extent(impl), pointer_of(std::move(memory), device), nullptr, false)));
  impl->set_storage_offset(0);
  impl->_change_backend_component_keys(device);
  return true;
}

// A tensor of a device in the memory of a CPU tensor, by C++ or by Python.
Tensor made(Tensor tensor, Context& context, int8_t index) {
  if (relabel(tensor, &context, index)) return tensor;
  py::gil_scoped_acquire gil;
  return asked("fresh", tensor, static_cast<int>(index)).cast<Tensor>();
}

// Let a storage of a device have the memory of a CPU tensor from now on. Return false where only Python can.
bool adopt(StorageImpl* storage, const Tensor& tensor, std::unique_ptr<Memory> memory) {
  if (!memory) return false;
  storage->set_data_ptr_noswap(pointer_of(std::move(memory), storage->device()));
  storage->set_nbytes(extent(tensor.unsafeGetTensorImpl()));
  return true;
}

// ---- kernels ---------------------------------------------------------------------------------------------------------

// What serving depends on, which the operator's kernel in Python knows (`serving.py`).
struct Facts {
  bool is_view;
  bool accepts_scalars;  // whether CPU tensors without dimensions may be among the arguments
  bool mixes;  // whether calls with tensors of several dtypes are served
  bool rounds_numbers;  // whether CUDA rounds numbers to the dtype of a tensor of halves, as the CPU does
  bool counts_writes;  // whether writes to lists are counted here
  bool copies;  // whether tensors may be on the CPU, and CUDA's values for integers may differ from the CPU's
  int generator;  // the place of the argument; behind the arguments where there is none; -1 if no numbers are drawn
  std::vector<int> outs;  // the places of arguments that a kernel may resize
  std::vector<int> given;  // for each result the argument that it is; -1 for a new tensor
  std::vector<at::ScalarType> refused;  // dtypes of the first tensor that is no number, which are not served
};

// Whether a function is true of each tensor of an argument.
template <class F>
bool all_tensors(const IValue& value, const F& holds) {
  if (value.isTensor()) return holds(value.toTensor());
  if (value.isTensorList()) {
    const auto list = value.toTensorVector();
    return std::all_of(list.begin(), list.end(), holds);
  }
  const auto list = value.isOptionalTensorList() ? value.toOptionalTensorVector() : std::vector<std::optional<Tensor>>();
  return std::all_of(list.begin(), list.end(), [&](const auto& each) { return !each || holds(*each); });
}

// The tensors of a call, and the CPU tensors in their places.
struct Aliases {
  c10::SmallVector<std::pair<Tensor, Tensor>, 8> pairs;
  int index = -1;
  bool has_dtype = false;
  at::ScalarType dtype = at::ScalarType::Undefined;  // of the first tensor that is no number
  bool has_host = false, to_host = false;  // whether a copy has a tensor of the CPU, and makes one

  Tensor of(const Tensor& tensor, bool is_out = false) {
    if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
    // One argument given twice is one tensor for the CPU kernel too.
    for (auto& [given, own] : pairs) {
      if (given.is_same(tensor)) return own;
    }
    auto& memory = *memory_of(tensor);
    // A tensor without memory, which a kernel may give some.
    pairs.emplace_back(tensor, is_out && memory.data == nullptr
        ? Tensor(at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), tensor.scalar_type()))
        : alias_of(tensor, memory));
    return pairs.back().second;
  }
};

// Warnings of a call, which the kernel in Python gives itself if the call is left to it.
struct Warnings : c10::WarningHandler {
  std::vector<c10::Warning> given;
  std::optional<c10::WarningUtils::WarningHandlerGuard> guard{this};

  void process(const c10::Warning& warning) override { given.push_back(warning); }

  void pass_on() {
    guard.reset();
    for (auto& each : given) c10::warn(each);
  }
};

// The two operators that compute on the device what the CPU computes in another way, as `handwritten_kernels.py` does.
void drop(Stack* stack) {
  const auto generator = torch::jit::pop(*stack).toGenerator();
  const bool trains = stack->back().isNone() || stack->back().toBool();
  const auto p = (*stack)[stack->size() - 2].toDouble();
  const auto given = (*stack)[stack->size() - 3].toTensor();
  TORCH_CHECK(trains && p != 0 && p != 1 && given.numel() != 0, "a case of the kernel in Python");
  auto noise = at::empty_like(given).bernoulli_(1 - p, generator);
  auto mask = noise.to(at::kBool);
  torch::jit::drop(*stack, 3);
  torch::jit::push(*stack, given.mul(noise.div_(1 - p)), std::move(mask));
}

void drop_backward(Stack* stack) {
  const auto scale = torch::jit::pop(*stack).toDouble();
  const auto mask = torch::jit::pop(*stack).toTensor(), given = torch::jit::pop(*stack).toTensor();
  auto noise = mask.to(given.scalar_type());
  torch::jit::push(*stack, given.mul(scale == 0 ? noise.zero_() : noise.div_(1 / scale)));
}

// ---- random numbers --------------------------------------------------------------------------------------------------

// The engines of the CPU's generator for the kernels that begin at an offset of a device's seed, and after it. An engine
// is made by 624 steps that wait for each other, so those of eight seeds take little longer than that of one.
struct Engines {
  static constexpr int COUNT = 8, PER_KERNEL = 4;  // the offset moves on by four
  uint64_t seed = 0, first = 0, expected = UINT64_MAX;
  int count = 0;
  at::mt19937 made[COUNT];

  // The seed of the CPU's generator, as `mixed` of `device_generators.py`.
  static uint64_t mixed(uint64_t seed, uint64_t offset) {
    uint64_t word = seed + (offset / PER_KERNEL + 1) * 0x9E3779B97F4A7C15;
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9;
    word = (word ^ word >> 27) * 0x94D049BB133111EB;
    return (word ^ word >> 31) >> 1;
  }

  template <int N>
  void make() {
    at::mt19937_data_pod data[N];
    uint32_t last[N];
    for (int i = 0; i < N; ++i) {
      data[i].seed_ = mixed(seed, first + i * PER_KERNEL);
      data[i].left_ = 1;
      data[i].seeded_ = true;
      data[i].next_ = 0;
      last[i] = data[i].state_[0] = static_cast<uint32_t>(data[i].seed_);
    }
    for (uint32_t step = 1; step < at::MERSENNE_STATE_N; ++step) {
      for (int i = 0; i < N; ++i) {
        last[i] = data[i].state_[step] = 1812433253 * (last[i] ^ last[i] >> 30) + step;
      }
    }
    for (int i = 0; i < N; ++i) made[i].set_data(data[i]);
    count = N;
  }

  // The engine for an offset. Of a program that draws from one generator, the next ones are made too.
  const at::mt19937& at(uint64_t of, uint64_t offset) {
    const bool goes_on = of == seed && offset == expected;
    const uint64_t place = (offset - first) / PER_KERNEL;
    expected = offset + PER_KERNEL;
    if (of == seed && offset >= first && place < static_cast<uint64_t>(count)) return made[place];
    seed = of;
    first = offset;
    goes_on ? make<COUNT>() : make<1>();
    return made[0];
  }
};

Engines engines;  // Python's lock is held where they are asked

void begin(at::Generator numbers, uint64_t seed, uint64_t offset) {
  std::lock_guard<std::mutex> guard(numbers.mutex());
  auto* own = numbers.get<at::CPUGeneratorImpl>();
  own->set_engine(engines.at(seed, offset));
  own->set_next_float_normal_sample(std::nullopt);
  own->set_next_double_normal_sample(std::nullopt);
}

class Kernel : public c10::OperatorKernel {
 public:
  explicit Kernel(const OperatorHandle& op)
      : in_python_(op.getComputedKernelForDispatchKey(DispatchKey::PrivateUse1)),
        has_cpu_(op.hasKernelForDispatchKey(DispatchKey::CPU)),
        count_(op.schema().arguments().size()),
        results_(op.schema().returns().size()) {
    for (auto& each : op.schema().arguments()) {
      is_device_.push_back(each.real_type()->str().find("Device") != std::string::npos);
      is_pin_.push_back(each.name() == "pin_memory");
    }
    const auto& name = op.schema().name();
    body_ = name == "aten::native_dropout" ? &drop : name == "aten::native_dropout_backward" ? &drop_backward : nullptr;
    is_convolution_ = name == "aten::convolution";
    fill_ = drawn_tensors::fill_of(op.operator_name());
  }

  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const auto* facts = facts_.load(std::memory_order_acquire);
    if (facts == nullptr) return in_python_.callBoxed(op, keys, stack);
    if (facts->is_view) return op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
    auto* context = serving();
    Aliases aliases;
    if (context == nullptr || !can_serve(*facts, *stack, *context, aliases)) {
      return in_python_.callBoxed(op, keys, stack);
    }
    run(*facts, op, keys, stack, *context, aliases);
  }

  // Serve calls from now on. Facts are never released, since another thread may be in a call.
  void serve(Facts facts) {
    const Facts* none = nullptr;
    auto known = std::make_unique<const Facts>(std::move(facts));
    if (facts_.compare_exchange_strong(none, known.get(), std::memory_order_release)) known.release();
  }

 private:
  // Whether the call is one that is served here. Finds the index of its device.
  bool can_serve(const Facts& facts, const Stack& stack, const Context& context, Aliases& aliases) const {
    // TorchScript's tracer knows convolutions by the operator within.
    if (at::globalContext().deterministicAlgorithms() || (is_convolution_ && torch::jit::tracer::isTracing())) {
      return false;
    }
    const auto base = stack.size() - count_;
    for (size_t i = 0; i < count_; ++i) {
      const IValue& value = stack[base + i];
      const bool fit = all_tensors(value, [&](const Tensor& each) { return fits(facts, each, aliases); });
      if (!fit || value.isStorage() || (is_pin_[i] && !value.isNone() && value.toBool())) return false;
    }
    if (!facts.rounds_numbers && !has_exact_numbers(at::ArrayRef<IValue>(stack).slice(base))) return false;
    const auto fits_at = [&](int i) { return fits_out(stack[base + i]); };
    if (!std::all_of(facts.outs.begin(), facts.outs.end(), fits_at)) return false;
    if (facts.copies && !copies_here(stack, base, context, aliases)) return false;
    for (size_t i = 0; i < count_ && !aliases.has_host; ++i) {
      if (is_device_[i] && stack[base + i].isDevice()) {
        const auto device = stack[base + i].toDevice();
        const int named = device.has_index() ? device.index() : 0;
        if (device.type() != OWN || named != aliases.index) return false;
      }
    }
    return aliases.index >= 0;
  }

  // Whether a tensor is a number in a call, which torch has made a tensor of.
  static bool is_number(const Tensor& tensor) {
    return tensor.defined() && tensor.is_cpu() && tensor.dim() == 0 &&
        (tensor.scalar_type() == at::kDouble || tensor.scalar_type() == at::kLong);
  }

  // Whether the numbers among the arguments need no rounding where the other tensors are halves.
  static bool has_exact_numbers(at::ArrayRef<IValue> given) {
    const auto is_number = [](const IValue& each) {
      return each.isScalar() || (each.isTensor() && Kernel::is_number(each.toTensor()));
    };
    auto dtype = at::ScalarType::Undefined;
    for (auto& each : given) {
      if (each.isTensor() && !is_number(each)) dtype = each.toTensor().scalar_type();
    }
    if (dtype != at::kHalf && dtype != at::kBFloat16) return true;
    return std::all_of(given.begin(), given.end(), [&](const IValue& each) {
      if (!is_number(each)) return true;
      const auto number = each.isScalar() ? each.toScalar() : each.toTensor().item();
      if (number.isComplex()) return true;
      const auto wide = number.toDouble();
      const auto narrow = static_cast<float>(wide);
      return (dtype == at::kHalf ? float(c10::Half(narrow)) : float(c10::BFloat16(narrow))) == wide;
    });
  }

  // Whether a kernel may give an argument another size here: where it lacks memory, or has all of its twin's.
  static bool fits_out(const IValue& value) {
    if (!value.isTensor() || !value.toTensor().is_privateuseone()) return false;
    const auto& tensor = value.toTensor();
    const auto& memory = *memory_of(tensor);
    return !tensor.is_conj() && !tensor.is_neg() &&
        (memory.data == nullptr ? tensor.storage_offset() == 0 : memory.twin->nbytes() == tensor.storage().nbytes());
  }

  // Whether `copy_` or `_to_copy` is served: not where it makes integers of other numbers (`cuda_values.py`), and not
  // between two devices.
  static bool copies_here(const Stack& stack, size_t base, const Context& context, Aliases& aliases) {
    const bool is_in_place = stack[base + 1].isTensor();
    const auto& self = stack[base].toTensor();
    const auto from = stack[base + is_in_place].toTensor().scalar_type();
    const auto to = is_in_place ? self.scalar_type() : stack[base + 1].toOptional<at::ScalarType>().value_or(from);
    auto device = self.device();
    if (!is_in_place && stack[base + 3].isDevice()) {
      device = stack[base + 3].toDevice();
      const bool waits = device.is_cpu() && !stack[base + 5].toBool();
      if (!waits && !(context.is_initialized && device.type() == OWN && device.has_index())) return false;
      aliases.has_host = aliases.has_host || device.is_cpu();
      aliases.index = aliases.index < 0 ? device.index() : aliases.index;
    }
    aliases.to_host = device.is_cpu();
    return !(c10::isIntegralType(to, false) && c10::isFloatingType(from)) &&
        (device.is_cpu() || device.index() == aliases.index);
  }

  static bool fits(const Facts& facts, const Tensor& tensor, Aliases& aliases) {
    if (!tensor.defined()) return true;
    const bool tells_dtype = !facts.mixes || !is_number(tensor);
    if (tells_dtype && !aliases.has_dtype) {
      aliases.has_dtype = true;
      aliases.dtype = tensor.scalar_type();
      if (std::find(facts.refused.begin(), facts.refused.end(), aliases.dtype) != facts.refused.end()) return false;
    } else if (!facts.mixes && tensor.scalar_type() != aliases.dtype) {
      return false;
    }
    if (!tensor.is_privateuseone()) {
      aliases.has_host = facts.copies;
      return tensor.is_cpu() && is_plain(tensor.unsafeGetTensorImpl()) && tensor.layout() == c10::kStrided &&
          (facts.copies || (facts.accepts_scalars && tensor.dim() == 0));
    }
    const int index = tensor.device().index();
    if (aliases.index >= 0 && aliases.index != index) return false;
    aliases.index = index;
    return memory_of(tensor) != nullptr && is_whole(tensor.unsafeGetTensorImpl());
  }

  // The program's generator among the arguments.
  static std::optional<at::Generator> generator_of(const Facts& facts, at::ArrayRef<IValue> given) {
    const size_t place = facts.generator;
    return place < given.size() ? given[place].toOptional<at::Generator>() : std::nullopt;
  }

  // Put the CPU's generator from which a call draws in the place of the program's, or behind the arguments.
  bool draw(const Facts& facts, Stack* stack, int index) const {
    py::gil_scoped_acquire gil;
    const auto base = stack->size() - count_;
    const auto found = asked("numbers", generator_of(facts, torch::jit::last(*stack, count_)), index);
    if (found.is_none()) return false;
    const auto [numbers, seed, offset] = found.cast<std::tuple<at::Generator, uint64_t, uint64_t>>();
    begin(numbers, seed, offset);
    stack->resize(base + std::max<size_t>(count_, facts.generator + 1));
    (*stack)[base + facts.generator] = numbers;
    return true;
  }

  // Fill a tensor with a GPU's numbers. False for a call that is left to Python.
  bool fill(const Facts& facts, at::ArrayRef<IValue> given, Aliases& aliases) const {
    c10::SmallVector<IValue, 4> own(given.begin(), given.end());
    for (auto i : facts.outs) own[i] = aliases.of(given[i].toTensor(), true);
    for (auto& each : own) put_alias(each, aliases, false);
    return fill_(own, [&](int64_t count, int of_each_counter) -> std::optional<drawn_tensors::Source> {
      py::gil_scoped_acquire gil;
      const auto found = asked("gpu_numbers", generator_of(facts, given), aliases.index, count, of_each_counter);
      if (found.is_none()) return std::nullopt;
      const auto [seed, offset, threads] = found.cast<std::tuple<uint64_t, uint64_t, int64_t>>();
      return drawn_tensors::Source{seed, offset, threads};
    });
  }

  void run(
      const Facts& facts, const OperatorHandle& op, DispatchKeySet keys, Stack* stack, Context& context,
      Aliases& aliases) const {
    const auto base = stack->size() - count_;
    c10::SmallVector<IValue, 12> given(stack->begin() + base, stack->end());
    const auto leave_to_python = [&] {
      stack->resize(base);
      stack->insert(stack->end(), given.begin(), given.end());
      in_python_.callBoxed(op, keys, stack);
    };
    if (facts.generator >= 0 && context.draws_as_gpu) {
      if (fill_ == nullptr || !fill(facts, given, aliases)) return leave_to_python();
      for (auto i : facts.outs) settle(given[i].toTensor(), aliases.of(given[i].toTensor()), context, aliases.index);
      stack->resize(base);
      return torch::jit::push(*stack, std::move(given[facts.given[0]]));
    }
    if (facts.generator >= 0 && !draw(facts, stack, aliases.index)) return leave_to_python();
    for (auto i : facts.outs) {
      (*stack)[base + i] = aliases.of(given[i].toTensor(), true);
    }
    for (size_t i = 0; i < count_; ++i) {
      put_alias((*stack)[base + i], aliases, is_device_[i]);
    }
    std::optional<Warnings> warnings;
    if (!facts.outs.empty()) warnings.emplace();
    try {
      if (body_ != nullptr) {
        body_(stack);
      } else if (has_cpu_) {
        op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
      } else {
        op.callBoxed(stack);
      }
    } catch (const c10::Error& error) {
      // The kernel in Python gives the error that CUDA gives, or what CUDA has a kernel for. A list may be half written.
      const std::string text = error.what_without_backtrace();
      if (facts.counts_writes && text.find("not implemented for '") == std::string::npos) throw;
      if (facts.generator >= 0) {
        py::gil_scoped_acquire gil;
        asked("undrawn", generator_of(facts, given), aliases.index);
      }
      warnings.reset();
      return leave_to_python();
    }
    if (warnings) warnings->pass_on();
    if (facts.counts_writes) count_writes(op, given);
    for (auto i : facts.outs) {
      settle(given[i].toTensor(), aliases.of(given[i].toTensor()), context, aliases.index);
    }
    const auto at = stack->size() - results_;
    for (size_t i = 0; i < results_; ++i) {
      auto& result = (*stack)[at + i];
      if (facts.given[i] >= 0) {
        result = std::move(given[facts.given[i]]);
      } else if (!aliases.to_host) {
        result = on_device(std::move(result), context, aliases);
      }
    }
    if (aliases.has_host && facts.copies) {
      const bool is_in_place = given[1].isTensor();
      py::gil_scoped_acquire gil;
      asked("copied", given[is_in_place].toTensor(), stack->back().toTensor(), given[is_in_place ? 2 : 5].toBool());
    }
  }

  // Give an `out` argument the shape of the CPU tensor in its place, and the memory where it had none.
  static void settle(const Tensor& given, const Tensor& own, Context& context, int8_t index) {
    auto* storage = given.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    const bool is_new = storage->data() == nullptr && own.numel() != 0;
    if (is_new && !adopt(storage, own, memory_for(own.unsafeGetTensorImpl(), &context, index))) {
      py::gil_scoped_acquire gil;
      asked("settle", given, own);
    } else if (given.sizes() != own.sizes() || given.strides() != own.strides()) {
      given.unsafeGetTensorImpl()->set_sizes_and_strides(own.sizes(), own.strides());
    }
  }

  static void put_alias(IValue& value, Aliases& aliases, bool is_device) {
    if (value.isTensor()) {
      const Tensor& tensor = value.toTensor();
      if (tensor.defined() && tensor.is_privateuseone()) {
        value = aliases.of(tensor);
      }
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& each : list) {
        each = aliases.of(each);
      }
      value = c10::List<Tensor>(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& each : value.toOptionalTensorList()) {
        list.push_back(each ? std::optional(aliases.of(*each)) : each);
      }
      value = list;
    } else if (is_device && value.isDevice()) {
      value = Device(c10::kCPU);
    }
  }

  // Autograd counts writes to results only, so CUDA's kernels count those to lists.
  void count_writes(const OperatorHandle& op, const c10::SmallVectorImpl<IValue>& given) const {
    for (size_t i = 0; i < count_; ++i) {
      const auto* alias = op.schema().arguments()[i].alias_info();
      if (alias != nullptr && alias->isWrite() && given[i].isTensorList()) {
        for (const Tensor& each : given[i].toTensorVector()) {
          if (!each.is_inference()) {
            each.unsafeGetTensorImpl()->bump_version();
          }
        }
      }
    }
  }

  static Tensor tensor_on_device(Tensor tensor, Context& context, Aliases& aliases) {
    if (!tensor.defined()) return tensor;
    const auto index = static_cast<int8_t>(aliases.index);
    if (tensor.layout() != c10::kStrided || !tensor.is_cpu() || !is_plain(tensor.unsafeGetTensorImpl())) {
      py::gil_scoped_acquire gil;
      // Parts of the result may have the memory of arguments.
      for (auto& [given, _] : aliases.pairs) {
        asked("known", given);
      }
      return asked("wrapped", tensor, aliases.index).cast<Tensor>();
    }
    // The CPU kernel returned the memory of an argument, so the result shares the argument's storage.
    auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    for (auto& [given, own] : aliases.pairs) {
      if (own.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == storage && tensor.numel() != 0) {
        Tensor view = copied(tensor);
        view.unsafeGetTensorImpl()->set_storage_keep_dtype(given.storage());
        view.unsafeGetTensorImpl()->_change_backend_component_keys(given.device());
        return view;
      }
    }
    return made(std::move(tensor), context, index);
  }

  static IValue on_device(IValue result, Context& context, Aliases& aliases) {
    if (result.isTensor()) return tensor_on_device(std::move(result).toTensor(), context, aliases);
    if (result.isTensorList()) {
      auto list = result.toTensorVector();
      result = IValue();
      for (auto& each : list) {
        each = tensor_on_device(std::move(each), context, aliases);
      }
      return c10::List<Tensor>(list);
    }
    // A number came to the host, which has waited for it.
    if (auto& ledger = context.ledgers[aliases.index]; !ledger || !ledger->leads) {
      py::gil_scoped_acquire gil;
      asked("waited");
    }
    return result;
  }

  std::atomic<const Facts*> facts_{nullptr};  // null until the kernel in Python knows them: at a first call
  const c10::SafeKernelFunction in_python_;
  const bool has_cpu_;
  const size_t count_, results_;
  std::vector<bool> is_device_, is_pin_;
  void (*body_)(Stack*) = nullptr;
  bool is_convolution_ = false;
  drawn_tensors::Fill fill_ = nullptr;
};

// ---- attention -------------------------------------------------------------------------------------------------------

// Refuses gradients, in the words of the device's kernel.
struct Refusing : torch::autograd::Function<Refusing> {
  static std::vector<Tensor> forward(
      torch::autograd::AutogradContext* context, const std::string& text, at::TensorList given) {
    context->saved_data["text"] = text;
    std::vector<Tensor> found;
    for (const Tensor& each : given) {
      found.push_back(copied(each));
    }
    return found;
  }

  static std::vector<Tensor> backward(torch::autograd::AutogradContext* context, std::vector<Tensor>) {
    TORCH_CHECK(false, context->saved_data["text"].toStringRef());
  }
};

// Lets gradients of the gradients that a node returns be refused.
struct RefusingHook : torch::autograd::FunctionPostHook {
  const std::string text;

  explicit RefusingHook(std::string text) : text(std::move(text)) {}

  std::vector<Tensor> operator()(const std::vector<Tensor>& gradients, const std::vector<Tensor>&) override {
    auto found = gradients;
    if (!at::GradMode::is_enabled()) return found;
    for (Tensor& each : found) {
      if (each.defined() && each.requires_grad()) {
        each = Refusing::apply(text, at::TensorList(each))[0];
      }
    }
    return found;
  }
};

// Whether a transform of functorch runs, which does not see calls that are made in a kernel.
bool transforms() {
  return c10::impl::tls_local_dispatch_key_set().included_.has_any(
      DispatchKeySet(DispatchKey::FuncTorchDynamicLayerFrontMode) | DispatchKeySet(DispatchKey::FuncTorchDynamicLayerBackMode));
}

// `scaled_dot_product_attention` by the kernel that torch would choose on the CPU, above autograd, as `attend` of
// `handwritten_kernels.py`.
class Attention : public c10::OperatorKernel {
 public:
  Attention(const OperatorHandle& op, DispatchKey key) : in_python_(op.getComputedKernelForDispatchKey(key)) {}

  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const auto given = torch::jit::last(*stack, 8);
    Aliases aliases;
    const auto tensor = [&](size_t i) { return given[i].isNone() ? Tensor() : given[i].toTensor(); };
    const auto alias = [&](size_t i) { return aliases.of(tensor(i)); };
    const Tensor query = tensor(0), key = tensor(1), value = tensor(2), mask = tensor(3);
    const auto fits = [&](const Tensor& each) {
      // CUDA refuses more heads and batches, and Python says so.
      const bool few = each.dim() < 2 || std::max(each.size(0), each.size(1)) < 65536;
      return few && each.is_privateuseone() && each.device() == query.device() && memory_of(each) != nullptr &&
          is_whole(each.unsafeGetTensorImpl()) && !each._fw_grad(/*level=*/0).defined();
    };
    const bool has_mask = mask.defined();
    auto* context = serving();
    if (context == nullptr || !at::globalContext().userEnabledMathSDP() || !fits(query) || !fits(key) || !fits(value) ||
        (has_mask && (mask.requires_grad() || !fits(mask))) || transforms()) {
      return in_python_.callBoxed(op, keys, stack);
    }
    auto added = has_mask ? std::optional(mask) : std::nullopt;
    const auto own = has_mask ? std::optional(alias(3)) : std::nullopt;
    const auto p = given[4].toDouble();
    const auto is_causal = given[5].toBool(), groups = given[7].toBool();
    const auto scale = given[6].toOptional<double>();
    const bool is_watched = query.requires_grad() || key.requires_grad() || value.requires_grad();
    Differentiated differentiated;
    if (at::GradMode::is_enabled() && is_watched) {
      differentiated = differentiated_by(*context, query, key, value, mask, p, is_causal, groups);
    }
    const auto choice = at::_fused_sdp_choice(alias(0), alias(1), alias(2), own, p, is_causal, scale, groups);
    const auto& [composes, refusal] = differentiated;
    const bool is_flash = !composes && choice == static_cast<int64_t>(at::SDPBackend::flash_attention);
    // The kernel takes four dimensions, and Python adds one. It also puts a node around what torch composes here and
    // the device does not.
    if ((is_flash && query.dim() == 3) || (!is_flash && !refusal.empty())) {
      return in_python_.callBoxed(op, keys, stack);
    }
    if (is_flash && added && mask.scalar_type() == at::kBool) {
      added = at::zeros_like(mask, query.scalar_type()).masked_fill(mask.logical_not(), -INFINITY);
    }
    auto found = is_flash
        ? std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, p, is_causal, added, scale))
        : at::native::scaled_dot_product_attention(query, key, value, added, p, is_causal, scale, groups);
    if (!refusal.empty()) {
      found.grad_fn()->add_post_hook(std::make_unique<RefusingHook>(refusal));
    }
    torch::jit::drop(*stack, 8);
    torch::jit::push(*stack, std::move(found));
  }

 private:
  // Ask Python once for each kind of call, since its checks of what the device's kernels take are longer than a node.
  static Differentiated differentiated_by(
      Context& context, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask, double p,
      bool is_causal, bool groups) {
    auto& settings = at::globalContext();
    std::vector<int64_t> kind = {
        query.device().index(), is_causal, groups, settings.userEnabledFlashSDP(), settings.userEnabledMemEfficientSDP(),
        settings.userEnabledCuDNNSDP(), settings.deterministicAlgorithms(), settings.deterministicAlgorithmsWarnOnly(),
        c10::bit_cast<int64_t>(p)};
    for (const auto each : settings.sDPPriorityOrder()) {
      kind.push_back(static_cast<int64_t>(each));
    }
    for (const Tensor* each : {&query, &key, &value, &mask}) {
      if (!each->defined()) continue;
      kind.insert(kind.end(), {each->dim(), static_cast<int64_t>(each->scalar_type()), each->requires_grad()});
      kind.insert(kind.end(), each->sizes().begin(), each->sizes().end());
      kind.insert(kind.end(), each->strides().begin(), each->strides().end());
    }
    {
      std::lock_guard<std::mutex> guard(context.mutex);
      const auto found = context.differentiated.find(kind);
      if (found != context.differentiated.end()) return found->second;
    }
    py::gil_scoped_acquire gil;
    const auto given_mask = mask.defined() ? py::cast(mask) : py::none();
    auto found = asked("differentiated", query, key, value, given_mask, p, is_causal, groups).cast<Differentiated>();
    std::lock_guard<std::mutex> guard(context.mutex);
    if (context.differentiated.size() >= 1024) {  // as many shapes as a program has; another's begin again
      context.differentiated.clear();
    }
    return context.differentiated[kind] = found;
  }

  const c10::SafeKernelFunction in_python_;
};

// ---- memory without values -------------------------------------------------------------------------------------------

// The kernels in Python of the two operators below.
std::map<std::string, c10::SafeKernelFunction> kernels_in_python;

template <class... Args>
Tensor in_python(const char* name, Args&&... args) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
      name, std::string(name) == "aten::empty" ? "memory_format" : "");
  Stack stack;
  torch::jit::push(stack, std::forward<Args>(args)...);
  kernels_in_python.at(name).callBoxed(op, DispatchKeySet(DispatchKey::PrivateUse1), &stack);
  return stack.back().toTensor();
}

bool can_make(
    const Context* context, std::optional<c10::Layout> layout, std::optional<Device> device, std::optional<bool> pin) {
  return context != nullptr && context->is_initialized && !at::globalContext().deterministicAlgorithms() && device &&
      device->type() == OWN && device->has_index() && layout.value_or(c10::kStrided) == c10::kStrided &&
      !pin.value_or(false);
}

// Undefined where the host has too little memory: the kernel in Python raises the error that CUDA raises.
template <class Allocate>
Tensor host_memory(Allocate allocate) {
  try {
    return Tensor(allocate());
  } catch (const c10::Error&) {
    return Tensor();
  }
}

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  auto* context = serving();
  Tensor memory;
  if (can_make(context, layout, device, pin)) {
    memory = host_memory([&] { return at::detail::empty_cpu(size, c10::dtype_or_default(dtype), false, format); });
  }
  if (!memory.defined()) return in_python("aten::empty", size, dtype, layout, device, pin, format);
  return made(std::move(memory), *context, device->index());
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<c10::Layout> layout, std::optional<Device> device, std::optional<bool> pin) {
  auto* context = serving();
  Tensor memory;
  if (can_make(context, layout, device, pin)) {
    memory = host_memory([&] { return at::detail::empty_strided_cpu(size, stride, c10::dtype_or_default(dtype), false); });
  }
  if (!memory.defined()) return in_python("aten::empty_strided", size, stride, dtype, layout, device, pin);
  return made(std::move(memory), *context, device->index());
}

// ---- registration ----------------------------------------------------------------------------------------------------

// The kernels that want facts, by operator. They and their registrations are never taken out, since another thread may be
// between the look-up of a kernel and the kernel. Where a thread's context is not served, they call those in Python.
std::unordered_map<c10::OperatorName, Kernel*>& kernels = *new std::unordered_map<c10::OperatorName, Kernel*>;
std::vector<c10::RegistrationHandleRAII>& in_place = *new std::vector<c10::RegistrationHandleRAII>;

// Warnings of the dispatcher that a kernel replaces another: that is what is meant here.
struct Silence : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Whether the kernel of an operator is that of `backend.py`, and not one of a program.
bool has_own_kernel(const OperatorHandle& op, DispatchKey key) {
  return op.getComputedKernelForDispatchKey(key).debug().find("backend.py") != std::string::npos;
}

c10::KernelFunction kernel_of(const OperatorHandle& op, DispatchKey key) {
  using c10::KernelFunction;
  static const std::map<std::string, KernelFunction (*)()> unboxed = {
      {"aten::view", [] { return KernelFunction::makeFromUnboxedRuntimeFunction(&at::native::view); }},
      {"aten::as_strided", [] { return KernelFunction::makeFromUnboxedRuntimeFunction(&at::native::as_strided_tensorimpl); }},
      {"aten::_reshape_alias", [] { return KernelFunction::makeFromUnboxedRuntimeFunction(&at::native::_reshape_alias); }},
      {"aten::empty.memory_format", [] { return KernelFunction::makeFromUnboxedRuntimeFunction(&empty); }},
      {"aten::empty_strided", [] { return KernelFunction::makeFromUnboxedRuntimeFunction(&empty_strided); }},
  };
  const auto name = toString(op.operator_name());
  if (const auto found = unboxed.find(name); found != unboxed.end()) {
    kernels_in_python.emplace(op.schema().name(), op.getComputedKernelForDispatchKey(key));
    return found->second();
  }
  if (name == "aten::scaled_dot_product_attention") {
    return KernelFunction::makeFromBoxedKernel(
        c10::BoxedKernel::makeFromFunctor(std::make_unique<Attention>(op, key)));
  }
  auto made = std::make_unique<Kernel>(op);
  kernels[op.operator_name()] = made.get();
  return KernelFunction::makeFromBoxedKernel(c10::BoxedKernel::makeFromFunctor(std::move(made)));
}

void put(const OperatorHandle& op, DispatchKey key) {
  if (!op.hasSchema() || !has_own_kernel(op, key)) return;
  in_place.push_back(c10::Dispatcher::singleton().registerImpl(
      op.operator_name(), key, kernel_of(op, key), std::nullopt, nullptr, "torchdevice"));
}

// Put the kernels of all operators in ATen in place, once, over those in Python, while no thread computes on a device:
// the dispatcher's tables are not made for a change beside a call. Later calls change nothing.
void put_all() {
  if (!in_place.empty()) return;
  Silence silence;
  c10::WarningUtils::WarningHandlerGuard guard(&silence);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (op && name.name.rfind("aten::", 0) == 0) {
      put(*op, DispatchKey::PrivateUse1);
    }
  }
  put(*dispatcher.findOp({"aten::scaled_dot_product_attention", ""}), DispatchKey::AutogradPrivateUse1);
}

// Let the kernel of an operator serve calls, which until then go to Python. Does nothing for an operator that a program
// had given a kernel of its own, or that came later.
void offer(const std::string& name, const std::string& overload, Facts facts) {
  if (const auto found = kernels.find({name, overload}); found != kernels.end()) {
    found->second->serve(std::move(facts));
  }
}

// ---- the device guard ------------------------------------------------------------------------------------------------

// Gives the answers of the guard in Python (`device_guard.py`) without Python, so that no error can be pending.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return OWN; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(OWN, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  c10::Stream getStream(Device) const override { return c10::Stream(c10::Stream::DEFAULT, getDevice()); }
  c10::Stream getDefaultStream(Device) const override { return getStream(getDevice()); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(getDevice()); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

const Guard guard_of_kernels;
const c10::impl::DeviceGuardImplInterface* guard_in_python = nullptr;
bool is_in_place = false;

std::atomic<const c10::impl::DeviceGuardImplInterface*>& guard_of_torch() {
  return c10::impl::device_guard_impl_registry[static_cast<size_t>(OWN)];
}

void install() {
  if (is_in_place) return;
  is_in_place = true;
  guard_in_python = guard_of_torch().exchange(&guard_of_kernels);
}

void uninstall() {
  if (!is_in_place) return;
  is_in_place = false;
  guard_of_torch().store(guard_in_python);
}

StorageImpl* storage_at(int64_t cdata) { return reinterpret_cast<StorageImpl*>(cdata); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pthread_atfork(&before_fork, &after_fork, &after_fork);
  py::class_<Ledger, std::shared_ptr<Ledger>>(m, "Ledger")
      .def(py::init(&new_ledger))
      .def_readonly("number", &Ledger::number)
      .def_readonly("leads", &Ledger::leads)
      .def("freeze", &Ledger::freeze)
      .def("lead", &Ledger::lead)
      .def("take_kept", &Ledger::take_kept)
      .def("give_kept", &Ledger::give_kept)
      .def("take_ended", &Ledger::take_ended)
      .def("memory", [](Ledger& self) {
        std::lock_guard<std::mutex> guard(self.mutex);
        const auto &now = self.whole.current, &peak = self.whole.peak;
        return std::tuple(now[ALLOCATED], now[RESERVED], peak[ALLOCATED], peak[RESERVED]);
      })
      // Whether the memory with this number has a block of the model, and has not ended.
      .def("owns", [](Ledger& self, int64_t number) {
        std::lock_guard<std::mutex> guard(self.mutex);
        return self.owners.count(number) != 0;
      });
  py::class_<End>(m, "End").def("release", [](End& self) { asked("release", self.ledger, self.number); });
  py::class_<Context, std::shared_ptr<Context>>(m, "Context")
      .def(py::init<>())
      .def_property("serves", [](Context& self) { return self.serves.load(); },
                    [](Context& self, bool value) { self.serves = value; })
      .def_property("is_initialized", [](Context& self) { return self.is_initialized.load(); },
                    [](Context& self, bool value) { self.is_initialized = value; })
      .def_property("draws_as_gpu", [](Context& self) { return self.draws_as_gpu.load(); },
                    [](Context& self, bool value) { self.draws_as_gpu = value; })
      .def("use", [](Context& self, int index, std::shared_ptr<Ledger> ledger) { self.ledgers[index] = ledger; });
  m.def("answer_by", [](py::object by) { answers = by.release().ptr(); });
  m.def("follow", [](std::shared_ptr<Context> context, bool changes_streams) {
    thread.context = std::move(context);
    thread.changes_streams = changes_streams;
  });
  m.def("stream_changed", [] { thread.changes_streams = true; });
  m.def("put_all", &put_all);
  m.def("offer", [](const std::string& name, const std::string& overload, bool is_view, bool accepts_scalars,
                    bool mixes, bool rounds_numbers, bool counts_writes, bool copies, int generator,
                    std::vector<int> outs, std::vector<int> given, std::vector<at::ScalarType> refused) {
    offer(name, overload, {is_view, accepts_scalars, mixes, rounds_numbers, counts_writes, copies, generator,
                           std::move(outs), std::move(given), std::move(refused)});
  });
  // The random numbers of a GPU: the kind, the address and number of elements, seed, offset and threads.
  m.def("fill_random", [](const std::string& kind, uintptr_t address, int64_t size, uint64_t seed, uint64_t offset,
                          int64_t threads) {
    return random_numbers::fill(kind, reinterpret_cast<void*>(address), size, seed, offset, threads);
  }, py::call_guard<py::gil_scoped_release>());
  // `x * factor + summand` in float32 memory, where `end` becomes `start`: see `random_numbers/philox.py`.
  m.def("scale_random", [](uintptr_t address, int64_t size, double factor, double summand, float end, float start) {
    random_numbers::scale(reinterpret_cast<float*>(address), size, factor, summand, end, start);
  }, py::call_guard<py::gil_scoped_release>());
  m.def("install", &install);
  m.def("uninstall", &uninstall);
  // A tensor of a device in the memory of a CPU tensor; None where only Python can make it.
  m.def("made", [](const Tensor& tensor, std::shared_ptr<Context> context, int index) -> std::optional<Tensor> {
    Tensor found = tensor;
    return relabel(found, context.get(), static_cast<int8_t>(index)) ? std::optional(found) : std::nullopt;
  });
  // The same without a block, and the number of its memory: the model in Python has the block.
  m.def("made_for", [](const Tensor& tensor, std::shared_ptr<Ledger> ledger) {
    Tensor found = tensor;
    relabel(found, nullptr, ledger->index);
    auto* memory = memory_of(found);
    ledger->own(*memory);
    return py::make_tuple(found, memory->number);
  });
  // The CPU tensor with the memory of a storage that was made here, the numbers of its memory and ledger, and its index.
  m.def("known", [](int64_t cdata, at::ScalarType dtype) -> py::object {
    auto* memory = memory_of(storage_at(cdata));
    if (memory == nullptr || memory->data == nullptr) return py::none();
    auto base = at::detail::make_tensor<TensorImpl>(
        c10::Storage(memory->twin), DispatchKeySet(DispatchKey::CPU), c10::scalarTypeToTypeMeta(dtype));
    base.unsafeGetTensorImpl()->set_sizes_contiguous(
        {static_cast<int64_t>(memory->twin->nbytes() / c10::elementSize(dtype))});
    return py::make_tuple(base, memory->number, memory->ledger ? memory->ledger->number : 0,
                          static_cast<int>(storage_at(cdata)->device().index()));
  });
  // Let a storage have the memory of a CPU tensor from now on. The model in Python has the block for a ledger, if any;
  // a context has one here. The number of the memory; 0 where the storage has memory of Python's, or needs some.
  m.def("adopt", [](int64_t cdata, const Tensor& tensor, std::shared_ptr<Ledger> ledger,
                    std::shared_ptr<Context> context) -> int64_t {
    auto* storage = storage_at(cdata);
    if (memory_of(storage) == nullptr && storage->nbytes() != 0) return 0;
    auto memory = memory_for(tensor.unsafeGetTensorImpl(), context.get(), storage->device().index());
    if (ledger && memory) ledger->own(*memory);
    const int64_t number = memory ? memory->number : 0;
    return adopt(storage, tensor, std::move(memory)) ? number : 0;
  });
  // Keep the memory of a storage, whose address the program has read, when its block is freed.
  m.def("keep", [](int64_t cdata) {
    if (auto* memory = memory_of(storage_at(cdata)); memory != nullptr && memory->ledger) {
      std::lock_guard<std::mutex> guard(memory->ledger->mutex);
      memory->is_known = true;
    }
  });
  // Let Python alone serve a storage from now on.
  m.def("disown", [](int64_t cdata) {
    if (auto* memory = memory_of(storage_at(cdata))) {
      memory->is_foreign = true;
    }
  });
}
