// The kernels as XLA custom calls on the CPU platform (XLA FFI: the C header that jaxlib brings, whose templates in C++ take a compiler
// longer than the kernels do), and the library's self test: what no step's time rests on.
#include <string>

#include "arrivals.h"
#include "attention.h"
#include "compressed.h"
#include "dense.h"
#include "experts.h"
#include "index.h"
#include "router.h"
#include "self_test.h"
#include "streams.h"
#include "xla/ffi/api/c_api.h"

namespace dsjax {
namespace {

// The arguments of one of FFI's functions.
template <class Arguments>
Arguments sized(size_t size) {
  Arguments arguments{};
  arguments.struct_size = size;
  return arguments;
}
#define DSJAX_ARGUMENTS(Name) sized<Name>(Name##_STRUCT_SIZE)

XLA_FFI_Error* error(const XLA_FFI_Api* api, XLA_FFI_Error_Code code, const char* message) {
  auto arguments = DSJAX_ARGUMENTS(XLA_FFI_Error_Create_Args);
  arguments.errc = code, arguments.message = message;
  return api->XLA_FFI_Error_Create(&arguments);
}
XLA_FFI_Error* invalid(const XLA_FFI_Api* api, const char* message) { return error(api, XLA_FFI_Error_Code_INVALID_ARGUMENT, message); }
// Whether a function of FFI's failed, of whose error nothing is told.
bool failed(const XLA_FFI_Api* api, XLA_FFI_Error* found) {
  if (found == nullptr) return false;
  auto arguments = DSJAX_ARGUMENTS(XLA_FFI_Error_Destroy_Args);
  arguments.error = found;
  api->XLA_FFI_Error_Destroy(&arguments);
  return true;
}

typedef XLA_FFI_Buffer Array;

// Bytes of an element.
size_t width(const Array& array) {
  switch (array.dtype) {
    case XLA_FFI_DataType_F32: case XLA_FFI_DataType_S32: case XLA_FFI_DataType_U32: return 4;
    case XLA_FFI_DataType_F64: case XLA_FFI_DataType_S64: case XLA_FFI_DataType_U64: case XLA_FFI_DataType_C64: return 8;
    case XLA_FFI_DataType_C128: return 16;
    case XLA_FFI_DataType_F16: case XLA_FFI_DataType_BF16: case XLA_FFI_DataType_S16: case XLA_FFI_DataType_U16: return 2;
    default: return 1;
  }
}
size_t elements(const Array& array) {
  size_t all = 1;
  for (long i = 0; i < array.rank; i++) all *= array.dims[i];
  return all;
}
size_t bytes(const Array& array) { return elements(array) * width(array); }

// What a kernel is called with: arrays in the order, and settings by the names, of dsjax/kernels/native_calls.py. The last result of a
// call is its working memory, so that XLA plans it with all other buffers; its size comes from the functions at the end of this file.
class Call {
 public:
  explicit Call(XLA_FFI_CallFrame* frame) : frame_(frame) {}

  const XLA_FFI_Api* api() const { return frame_->api; }
  const Array& array(long index) {
    const bool there = index < frame_->args.size && frame_->args.types[index] == XLA_FFI_ArgType_BUFFER;
    return some(there ? frame_->args.args[index] : nullptr);
  }
  const Array& result(long index) {
    const bool there = 0 <= index && index < frame_->rets.size && frame_->rets.types[index] == XLA_FFI_RetType_BUFFER;
    return some(there ? frame_->rets.rets[index] : nullptr);
  }
  const Array& scratch() { return result(frame_->rets.size - 1); }

  // Sets pointers to the arrays from `index` on, and checks their types (any for `void`). An array without elements gives null.
  template <class... T>
  void arrays(long index, const T*&... pointers) {
    ((point(pointers, array(index)), pointers = elements(array(index++)) ? pointers : nullptr), ...);
  }
  template <class... T>
  void results(T*&... pointers) {
    long index = 0;
    (point(pointers, result(index++)), ...);
  }
  // Sets numbers to the lengths of an array's axes, of which there must be as many.
  template <class... Number>
  void axes(const Array& array, Number&... lengths) {
    require(array.rank == sizeof...(lengths));
    const int64_t* length = array.dims;
    ((lengths = *length++), ...);
  }
  // Sets each number to the setting whose name precedes it.
  template <class Number, class... More>
  void settings(const char* name, Number& number, More&&... more) {
    typedef std::conditional_t<std::is_same_v<Number, bool> || std::is_same_v<Number, float>, Number, int64_t> Sent;
    number = static_cast<Number>(setting<Sent>(name));
    if constexpr (sizeof...(more) > 0) settings(more...);
  }
  // Records a condition without which the call is refused.
  void require(bool fits) { fits_ = fits_ && fits; }

  // Has another of XLA's threads run a task; this one does, where XLA has none.
  Schedule pool() {
    const XLA_FFI_Api* api = frame_->api;
    XLA_FFI_ExecutionContext* context = frame_->ctx;
    return [api, context](std::function<void()> task) {
      auto arguments = DSJAX_ARGUMENTS(XLA_FFI_ThreadPool_Schedule_Args);
      auto* own = new std::function<void()>(std::move(task));
      arguments.ctx = context, arguments.data = own;
      arguments.task = [](void* data) {
        auto* task = static_cast<std::function<void()>*>(data);
        (*task)();
        delete task;
      };
      if (failed(api, api->XLA_FFI_ThreadPool_Schedule(&arguments))) arguments.task(own);
    };
  }

  // Runs a kernel with XLA's own threads, as many as it was told when it was traced.
  template <class Kernel>
  XLA_FFI_Error* run(Kernel kernel) {
    kernel.threads = static_cast<int>(setting<int64_t>("threads"));
    const Array& memory = scratch();
    if (!fits_) return invalid(api(), "a native kernel was given other arrays or settings than it takes");
    if (bytes(memory) < kernel.scratch_bytes()) return invalid(api(), "a native kernel was given less working memory than it needs");
    run_kernel(kernel, static_cast<char*>(memory.data), pool());
    return nullptr;
  }

  // Which execution of a program this is.
  int64_t run_id() {
    auto arguments = DSJAX_ARGUMENTS(XLA_FFI_RunId_Get_Args);
    arguments.ctx = frame_->ctx;
    require(!failed(api(), api()->XLA_FFI_RunId_Get(&arguments)));
    return arguments.run_id;
  }

  // Returns a future to XLA. The call is over when `proceed` is called with the outcome of a meeting.
  XLA_FFI_Error* promise(int64_t patience, std::function<void(Outcome)>& proceed) {
    auto arguments = DSJAX_ARGUMENTS(XLA_FFI_Future_Create_Args);
    XLA_FFI_Error* found = api()->XLA_FFI_Future_Create(&arguments);
    if (found != nullptr) return found;
    frame_->future = arguments.future;
    proceed = [api = api(), future = arguments.future, patience](Outcome outcome) { keep(api, future, patience, outcome); };
    return nullptr;
  }

  // Whether everything that was asked for is there, with the type that was asked for.
  bool fits() const { return fits_; }

 private:
  template <class T>
  static constexpr XLA_FFI_DataType type_of() {
    if (std::is_same_v<T, float>) return XLA_FFI_DataType_F32;
    if (std::is_same_v<T, int32_t>) return XLA_FFI_DataType_S32;
    if (std::is_same_v<T, uint32_t>) return XLA_FFI_DataType_U32;
    if (std::is_same_v<T, int64_t>) return XLA_FFI_DataType_S64;
    return std::is_same_v<T, bool> ? XLA_FFI_DataType_PRED : XLA_FFI_DataType_U8;
  }
  // An array; in the place of one that is not there, an empty one with as much to look at as any kernel looks at before it runs.
  const Array& some(const void* array) {
    static int64_t axes[8] = {};
    static const Array nothing{XLA_FFI_Buffer_STRUCT_SIZE, nullptr, XLA_FFI_DataType_INVALID, axes, 0, axes};
    require(array != nullptr);
    return array ? *static_cast<const Array*>(array) : nothing;
  }
  template <class T>
  void point(T*& pointer, const Array& array) {
    require(std::is_void_v<T> || array.dtype == type_of<std::remove_const_t<T>>());
    pointer = static_cast<T*>(array.data);
  }
  template <class T>
  T setting(const char* name) {
    const XLA_FFI_Attrs& all = frame_->attrs;
    for (long i = 0; i < all.size; i++) {
      const XLA_FFI_ByteSpan& found = *all.names[i];
      if (found.len != std::strlen(name) || std::memcmp(found.ptr, name, found.len) != 0) continue;
      if (all.types[i] != XLA_FFI_AttrType_SCALAR) break;
      const XLA_FFI_Scalar& scalar = *static_cast<const XLA_FFI_Scalar*>(all.attrs[i]);
      if (scalar.dtype != type_of<T>()) break;
      T value;
      std::memcpy(&value, scalar.value, sizeof(T));
      return value;
    }
    require(false);
    return T();
  }
  // Completes `future`, or sets its error.
  static void keep(const XLA_FFI_Api* api, XLA_FFI_Future* future, int64_t patience, Outcome outcome) {
    if (outcome == Outcome::met) {
      auto arguments = DSJAX_ARGUMENTS(XLA_FFI_Future_SetAvailable_Args);
      arguments.future = future;
      if (failed(api, api->XLA_FFI_Future_SetAvailable(&arguments))) std::abort();  // or XLA would wait for ever
      return;
    }
    auto arguments = DSJAX_ARGUMENTS(XLA_FFI_Future_SetError_Args);
    arguments.future = future;
    const std::string late = "a device did not come to an exchange with the others in " + std::to_string(patience) + " s; its step may have failed";
    if (outcome == Outcome::late) arguments.error = error(api, XLA_FFI_Error_Code_DEADLINE_EXCEEDED, late.c_str());
    else if (outcome == Outcome::no_memory)
      arguments.error = error(api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "there is no memory for what experts of a device are to compute");
    else arguments.error = invalid(api, "the devices of an exchange had not the places 0 to ranks - 1, each of them once");
    if (failed(api, api->XLA_FFI_Future_SetError(&arguments))) std::abort();
  }

  XLA_FFI_CallFrame* frame_;
  bool fits_ = true;
};

// Arrays and axes have the order of the calls in dsjax/kernels/native_calls.py and the names of the kernels' fields. Optional arrays that are
// not given have no elements.

// Rows are [N, W >= D] of 4 bytes an element. D or F is halved along the depth of packed weights.
Experts described_experts(Call& call) {
  Experts kernel;
  const int32_t* layer;
  const void* rows;
  call.arrays(0, kernel.gate_up, kernel.down, kernel.gate_up_scale, kernel.down_scale, kernel.gate_up_whole, kernel.down_whole, layer, rows,
              kernel.ids, kernel.weights);
  call.results(kernel.out);
  call.settings("threads", kernel.threads, "pieces", kernel.pieces, "fp4_block", kernel.fp4_block, "hidden", kernel.hidden_format, "powers",
                kernel.powers, "limit", kernel.limit);
  long layers, parts, N;
  call.axes(call.array(0), layers, kernel.X, kernel.D, parts, kernel.F);
  call.axes(call.array(7), N, kernel.row_stride);
  call.axes(call.array(8), kernel.N, kernel.K);
  kernel.layer = *layer, kernel.rows = static_cast<const float*>(rows), kernel.bytes = width(call.array(0));
  kernel.D *= kernel.fp4_block ? 2 : 1, kernel.integers = kernel.fp4_block && width(call.array(2)) == 2;
  kernel.apart = call.result(0).rank == 3;
  return kernel;
}

XLA_FFI_Error* experts(Call call) { return call.run(described_experts(call)); }

// weight [L, K, J] or [L, K, 2, J], transposed [L, J, K], rows [N, K]; or grouped [L, K, G, J], rows [N, G, K].
XLA_FFI_Error* dense(Call call) {
  const Array &weight = call.array(0), &rows = call.array(3);
  Dense kernel;
  const int32_t* layer;
  call.arrays(0, kernel.weight, kernel.scale, layer, kernel.x);
  call.results(kernel.out);
  call.settings("pieces", kernel.pieces, "transposed", kernel.transposed, "grouped", kernel.grouped);
  kernel.bytes = width(weight), kernel.layer = *layer, kernel.N = rows.dims[0];
  kernel.K = kernel.grouped ? weight.dims[1] : rows.dims[1], kernel.parts = weight.rank == 4 ? weight.dims[2] : 1;
  kernel.width = weight.dims[kernel.transposed || weight.rank < 3 ? 1 : weight.rank - 1];
  return call.run(kernel);
}

XLA_FFI_Error* norm(Call call) {
  Norm kernel;
  call.arrays(0, kernel.x, kernel.scale, kernel.bias);
  call.results(kernel.out);
  call.settings("eps", kernel.eps);
  call.axes(call.array(0), kernel.N, kernel.width);
  return call.run(kernel);
}

XLA_FFI_Error* router(Call call) {
  Router kernel;
  call.arrays(0, kernel.scores, kernel.bias);
  call.results(kernel.ids, kernel.weights);
  call.settings("groups", kernel.groups, "kept", kernel.kept, "best", kernel.best, "normalised", kernel.normalised, "factor", kernel.factor);
  call.axes(call.array(0), kernel.N, kernel.E);
  call.axes(call.result(0), kernel.N, kernel.K);
  return call.run(kernel);
}

template <class Kernel>
XLA_FFI_Error* attention(Call call) {
  Kernel kernel;
  KeyValueWeights& weights = kernel.weights;
  Cache& cache = kernel.cache;
  const int32_t *weights_layer, *layer;
  call.arrays(0, kernel.q_nope, kernel.q_rope, weights.data, weights.scale, weights_layer, cache.latent, cache.rope, cache.scale, layer,
              kernel.start, kernel.length, kernel.tables, kernel.filled, kernel.chosen);
  call.results(kernel.out);
  call.settings("scale", kernel.scale);
  long layers;
  call.axes(call.array(0), kernel.R, kernel.C, kernel.H, kernel.N);
  call.axes(call.array(1), kernel.R, kernel.C, kernel.H, kernel.O);
  call.axes(call.result(0), kernel.R, kernel.C, kernel.H, kernel.U);
  call.axes(call.array(2), layers, weights.M, weights.columns);
  call.axes(call.array(5), layers, cache.pages, cache.G, kernel.M);
  call.axes(call.array(11), kernel.R, kernel.Pr);
  weights.bytes = width(call.array(2)), weights.layer = *weights_layer;
  cache.bytes = width(call.array(5)), cache.layer = *layer;
  return call.run(kernel);
}

XLA_FFI_Error* index_choice(Call call) {
  IndexChoice kernel;
  const int32_t* layer;
  bool packed;
  call.arrays(0, kernel.query, kernel.weight, kernel.keys, kernel.key_scale, layer, kernel.positions, kernel.tables, kernel.filled);
  call.results(kernel.chosen, kernel.count, kernel.words);
  call.settings("packed", packed);
  long layers, key;
  call.axes(call.array(0), kernel.R, kernel.C, kernel.I, kernel.A);
  call.axes(call.array(2), layers, kernel.pages, kernel.G, key);
  call.axes(call.array(6), kernel.R, kernel.Pr);
  call.axes(call.result(0), kernel.R, kernel.C, kernel.k);
  kernel.bytes = packed ? 0 : width(call.array(2)), kernel.layer = *layer;
  return call.run(kernel);
}

XLA_FFI_Error* compressed_attention(Call call) {
  CompressedAttention kernel;
  Pages &window = kernel.window, &entries = kernel.entries;
  const int32_t *window_layer, *entries_layer;
  call.arrays(0, kernel.query, kernel.sink, window.data, entries.data, window_layer, entries_layer, kernel.positions, kernel.ring, kernel.tables,
              kernel.filled, kernel.chosen, kernel.count);
  call.results(kernel.out);
  call.settings("span", kernel.span, "scale", kernel.scale, "rotated", window.rotated);
  const Array &window_pages = call.array(2), &pages = call.array(3), &chosen = call.array(10);
  call.require(window.rotated || (window_pages.dtype == XLA_FFI_DataType_F32 && pages.dtype == XLA_FFI_DataType_F32));
  long layers, width;
  call.axes(call.array(0), kernel.R, kernel.C, kernel.H, kernel.M);
  call.axes(window_pages, layers, window.pages, window.G, width);
  call.axes(call.array(7), kernel.R, kernel.Pw);
  call.axes(call.array(8), kernel.R, kernel.Pr);
  window.layer = *window_layer, entries.layer = *entries_layer, entries.rotated = window.rotated;
  if (entries.data) call.axes(pages, layers, entries.pages, entries.G, width);
  if (kernel.chosen) call.axes(chosen, kernel.R, kernel.C, kernel.k);
  return call.run(kernel);
}

XLA_FFI_Error* streams(Call call) {
  Streams kernel;
  call.arrays(0, kernel.x, kernel.weight, kernel.base, kernel.factor);
  call.settings("rounds", kernel.rounds, "norm_eps", kernel.norm_eps, "eps", kernel.eps);
  call.axes(call.array(0), kernel.N, kernel.n, kernel.D);
  call.axes(call.array(2), kernel.w);
  if (kernel.w == kernel.n) call.results(kernel.read);
  else call.results(kernel.read, kernel.spread, kernel.mixing);
  return call.run(kernel);
}

XLA_FFI_Error* streams_after(Call call) {
  StreamsAfter kernel;
  call.arrays(0, kernel.x, kernel.spread, kernel.mixing, kernel.y);
  call.results(kernel.out);
  call.axes(call.array(0), kernel.N, kernel.n, kernel.D);
  return call.run(kernel);
}

// rows [N, W], this device's place in its group of `ranks`, [], and which of the groups it is, [] -> [N * ranks, W], every device's rows
// (gathers), or [N, W], where N / ranks rows are from each device.
XLA_FFI_Error* exchange_rows(Call call) {
  const Array &rows = call.array(0), &out = call.result(0);
  const void* from;
  const int32_t *place, *group;
  int64_t ranks, patience;
  bool gathers;
  call.arrays(0, from, place, group);
  call.settings("ranks", ranks, "patience", patience, "gathers", gathers);
  const int64_t run = call.run_id();
  // All that is looked at here is of the program, and the same on every device: where it does not fit, no device waits for another.
  if (!call.fits() || ranks < 1 || bytes(out) % ranks || bytes(rows) * (gathers ? ranks : 1) != bytes(out))
    return invalid(call.api(), "an exchange was given other arrays or settings than it takes");
  Part part{*place, static_cast<const char*>(from), static_cast<char*>(out.data), nullptr};
  if (XLA_FFI_Error* found = call.promise(patience, part.proceed)) return found;
  arrive_at_exchange(run, *group, ranks, bytes(out) / ranks, gathers, part, patience, call.pool());
  return nullptr;
}

// As `experts`, of `ranks` devices together: ids number the experts of all of them, `held` of each; and behind the weights this device's
// place in its group, [], and which of the groups it is, [] -> [N, D], and int32 [held + 1], counts as of `Guest`.
XLA_FFI_Error* experts_together(Call call) {
  const int32_t *place, *group;
  int64_t ranks, together, patience;
  Guest guest{};
  call.arrays(10, place, group);
  call.results(guest.out, guest.counts);
  call.settings("ranks", ranks, "held", guest.held, "together", together, "patience", patience);
  const int64_t run = call.run_id();
  const Array& memory = call.scratch();
  // As for `exchange_rows`: what does not fit here fits on no device.
  if (!call.fits() || ranks < 1 || guest.held < 1) return invalid(call.api(), "experts were given other arrays or settings than they take");
  const Experts& experts = guest.experts = described_experts(call);
  call.require(guest.held <= experts.X && elements(call.result(1)) == static_cast<size_t>(guest.held) + 1);
  call.require(call.array(7).dtype == XLA_FFI_DataType_F32 && elements(call.array(9)) == elements(call.array(8)));
  call.require(elements(call.result(0)) == static_cast<size_t>(experts.N * experts.D) && experts.row_stride >= experts.D);
  if (!call.fits() || bytes(memory) < sizeof(float) * experts.N * experts.K * experts.D)
    return invalid(call.api(), "experts were given other settings, or less working memory, than they need");
  guest.rank = *place, guest.terms = static_cast<float*>(memory.data);
  if (XLA_FFI_Error* found = call.promise(patience, guest.proceed)) return found;
  arrive_together(run, *group, ranks, guest, patience, static_cast<int>(together), call.pool());
  return nullptr;
}

// A call of XLA's: to be told which version of its interface this is written for, or to compute.
XLA_FFI_Error* answer(XLA_FFI_CallFrame* frame, XLA_FFI_Error* (*compute)(Call)) {
  if (frame->struct_size != XLA_FFI_CallFrame_STRUCT_SIZE)
    return invalid(frame->api, "native kernels were built with the headers of another version of jaxlib");
  if (frame->extension_start != nullptr && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    auto* extension = reinterpret_cast<XLA_FFI_Metadata_Extension*>(frame->extension_start);
    if (extension->extension_base.struct_size < XLA_FFI_Metadata_Extension_STRUCT_SIZE || extension->metadata->struct_size < XLA_FFI_Metadata_STRUCT_SIZE)
      return invalid(frame->api, "native kernels were built with the headers of another version of jaxlib");
    extension->metadata->api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
    extension->metadata->traits = 0;
    extension->metadata->state_type_id = XLA_FFI_UNKNOWN_TYPE_ID;
    return nullptr;
  }
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return invalid(frame->api, "a native kernel was called in another stage than execution");
  return compute(Call(frame));
}

// Sets a kernel's fields, and returns the bytes of working memory that it then needs.
template <class Kernel, class... Number>
int64_t scratch_of(const Kernel& kernel, const int64_t* numbers, Number&... fields) {
  ((fields = static_cast<Number>(*numbers++)), ...);
  return static_cast<int64_t>(kernel.scratch_bytes());
}

}  // namespace
}  // namespace dsjax

#define DSJAX_HANDLER(name, ...) \
  extern "C" XLA_FFI_Error* dsjax_##name(XLA_FFI_CallFrame* frame) { return dsjax::answer(frame, dsjax::__VA_ARGS__); }
// Defines a kernel's handler, and the function that returns its bytes of working memory from the values of these fields.
#define DSJAX_KERNEL(name, compute, Kernel, ...) \
  DSJAX_HANDLER(name, compute) \
  extern "C" int64_t dsjax_##name##_scratch(const int64_t* numbers) { \
    dsjax::Kernel kernel{}; \
    return dsjax::scratch_of(kernel, numbers, __VA_ARGS__); \
  }
#define DSJAX_ATTENTION(name, Kernel) \
  DSJAX_KERNEL(name, attention<dsjax::Kernel>, Kernel, kernel.R, kernel.C, kernel.H, kernel.N, kernel.O, kernel.U, kernel.M, kernel.cache.bytes, \
               kernel.threads)
DSJAX_KERNEL(experts, experts, Experts, kernel.X, kernel.D, kernel.F, kernel.N, kernel.K, kernel.bytes, kernel.apart, kernel.threads)
DSJAX_KERNEL(dense, dense, Dense, kernel.N, kernel.threads)
DSJAX_KERNEL(norm, norm, Norm, kernel.threads)
DSJAX_KERNEL(router, router, Router, kernel.E, kernel.groups, kernel.threads)
DSJAX_ATTENTION(absorbed_attention, AbsorbedAttention)
DSJAX_ATTENTION(expanded_attention, ExpandedAttention)
DSJAX_KERNEL(index_choice, index_choice, IndexChoice, kernel.R, kernel.C, kernel.I, kernel.A, kernel.Pr, kernel.G, kernel.threads)
DSJAX_KERNEL(compressed_attention, compressed_attention, CompressedAttention, kernel.H, kernel.M, kernel.window.rotated, kernel.threads)
DSJAX_KERNEL(streams, streams, Streams, kernel.n, kernel.D, kernel.w, kernel.threads)
DSJAX_KERNEL(streams_after, streams_after, StreamsAfter, kernel.threads)
DSJAX_HANDLER(exchange, exchange_rows)
DSJAX_HANDLER(experts_together, experts_together)
extern "C" int64_t dsjax_exchange_scratch(const int64_t*) { return 0; }
// Bytes of `Guest::terms` from N, K and D.
extern "C" int64_t dsjax_experts_together_scratch(const int64_t* numbers) { return sizeof(float) * numbers[0] * numbers[1] * numbers[2]; }
