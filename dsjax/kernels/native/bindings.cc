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

// An array that XLA has.
class Array {
 public:
  explicit Array(const XLA_FFI_Buffer* buffer) : buffer_(buffer) {}
  long rank() const { return buffer_->rank; }
  const int64_t* shape() const { return buffer_->dims; }
  XLA_FFI_DataType type() const { return buffer_->dtype; }
  void* data() const { return buffer_->data; }
  // Bytes of an element.
  size_t width() const {
    switch (type()) {
      case XLA_FFI_DataType_F32: case XLA_FFI_DataType_S32: case XLA_FFI_DataType_U32: return 4;
      case XLA_FFI_DataType_F64: case XLA_FFI_DataType_S64: case XLA_FFI_DataType_U64: case XLA_FFI_DataType_C64: return 8;
      case XLA_FFI_DataType_C128: return 16;
      case XLA_FFI_DataType_F16: case XLA_FFI_DataType_BF16: case XLA_FFI_DataType_S16: case XLA_FFI_DataType_U16: return 2;
      default: return 1;
    }
  }
  size_t elements() const {
    size_t all = 1;
    for (long i = 0; i < rank(); i++) all *= shape()[i];
    return all;
  }
  size_t size() const { return elements() * width(); }

 private:
  const XLA_FFI_Buffer* buffer_;
};

// What a kernel is called with: arrays in the order, and settings by the names, of dsjax/kernels/native_calls.py. The last result of a
// call is its working memory, so that XLA plans it with all other buffers; its size comes from the functions at the end of this file.
class Call {
 public:
  explicit Call(XLA_FFI_CallFrame* frame) : frame_(frame) {}

  const XLA_FFI_Api* api() const { return frame_->api; }
  Array array(long index) {
    const bool there = index < frame_->args.size && frame_->args.types[index] == XLA_FFI_ArgType_BUFFER;
    return some(there ? frame_->args.args[index] : nullptr);
  }
  const int64_t* shape(long index) { return array(index).shape(); }
  int bytes_of(long index) { return static_cast<int>(array(index).width()); }
  const void* data(long index) { return array(index).data(); }
  template <class T>
  const T* values(long index) {
    return static_cast<const T*>(typed<T>(array(index)));
  }
  Array result(long index) {
    const bool there = 0 <= index && index < frame_->rets.size && frame_->rets.types[index] == XLA_FFI_RetType_BUFFER;
    return some(there ? frame_->rets.rets[index] : nullptr);
  }
  template <class T>
  T* results(long index) {
    return static_cast<T*>(typed<T>(result(index)));
  }
  Array scratch() { return result(frame_->rets.size - 1); }
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
    fits_ = false;
    return T();
  }

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
    const Array memory = scratch();
    if (!fits_) return invalid(api(), "a native kernel was given other arrays or settings than it takes");
    if (memory.size() < kernel.scratch_bytes()) return invalid(api(), "a native kernel was given less working memory than it needs");
    run_kernel(kernel, static_cast<char*>(memory.data()), pool());
    return nullptr;
  }

  // Which execution of a program this is.
  int64_t run_id() {
    auto arguments = DSJAX_ARGUMENTS(XLA_FFI_RunId_Get_Args);
    arguments.ctx = frame_->ctx;
    fits_ = !failed(api(), api()->XLA_FFI_RunId_Get(&arguments)) && fits_;
    return arguments.run_id;
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
  Array some(const void* buffer) {
    static int64_t axes[8] = {};
    static XLA_FFI_Buffer nothing{XLA_FFI_Buffer_STRUCT_SIZE, nullptr, XLA_FFI_DataType_INVALID, axes, 0, axes};
    fits_ = fits_ && buffer != nullptr;
    return Array(buffer ? static_cast<const XLA_FFI_Buffer*>(buffer) : &nothing);
  }
  template <class T>
  void* typed(Array array) {
    fits_ = fits_ && array.type() == type_of<T>();
    return array.data();
  }

  XLA_FFI_CallFrame* frame_;
  bool fits_ = true;
};

// gate_up [L, X, D, 2, F], down [L, X, F, D], their scales (or anything, unless the weights are one byte wide), scales of whole
// matrices in NVFP4, [L, X, 2, 1] and [L, X, 1] (or one value), layer [], all with D or F halved along the depth in FP4 (fp4_block not 0),
// rows [N, W >= D] of 4 bytes an element, ids [N, K], weights [N, K] -> [N, D], or [N, K, D]: the terms of each sum apart.
Experts described_experts(Call& call) {
  auto shape = call.shape(0), table = call.shape(8);
  const int64_t fp4_block = call.setting<int64_t>("fp4_block");
  const bool wholes = fp4_block && call.array(4).rank() == 4;
  Experts kernel;
  kernel.gate_up = call.data(0);
  kernel.down = call.data(1);
  kernel.gate_up_scale = call.data(2);
  kernel.down_scale = call.data(3);
  kernel.bytes = call.bytes_of(0);
  kernel.layer = *call.values<int32_t>(6);
  kernel.X = shape[1], kernel.D = shape[2] * (fp4_block ? 2 : 1), kernel.F = shape[4];
  kernel.fp4_block = fp4_block, kernel.integers = fp4_block && call.bytes_of(2) == 2;
  kernel.hidden_format = static_cast<Hidden>(call.setting<int64_t>("hidden")), kernel.powers = call.setting<bool>("powers");
  kernel.limit = call.setting<float>("limit");
  kernel.gate_up_whole = wholes ? call.values<float>(4) : nullptr;
  kernel.down_whole = wholes ? call.values<float>(5) : nullptr;
  kernel.rows = static_cast<const float*>(call.data(7));
  kernel.row_stride = call.shape(7)[1];
  kernel.ids = call.values<int32_t>(8);
  kernel.weights = call.values<float>(9);
  kernel.N = table[0], kernel.K = table[1];
  kernel.out = call.results<float>(0);
  kernel.pieces = call.setting<int64_t>("pieces"), kernel.apart = call.result(0).rank() == 3;
  return kernel;
}

XLA_FFI_Error* experts(Call call) { return call.run(described_experts(call)); }

// weight [L, K, J] or [L, K, 2, J], or transposed [L, J, K]; its scales (or anything, unless it is one byte wide), layer [], rows [N, K]
// -> [N, J] or [N, 2, J]. Grouped: weight [L, K, G, J], rows [N, G, K] -> [N, G, J].
XLA_FFI_Error* dense(Call call) {
  auto shape = call.shape(0), rows = call.shape(3);
  const long rank = call.array(0).rank();
  Dense kernel;
  kernel.weight = call.data(0);
  kernel.scale = static_cast<const float*>(call.data(1));
  kernel.bytes = call.bytes_of(0);
  kernel.transposed = call.setting<bool>("transposed");
  kernel.layer = *call.values<int32_t>(2);
  kernel.grouped = call.setting<bool>("grouped");
  kernel.K = kernel.grouped ? shape[1] : rows[1], kernel.parts = rank == 4 ? shape[2] : 1;
  kernel.width = kernel.transposed || rank < 3 ? shape[1] : shape[rank - 1];
  kernel.pieces = call.setting<int64_t>("pieces");
  kernel.x = call.values<float>(3), kernel.N = rows[0];
  kernel.out = call.results<float>(0);
  return call.run(kernel);
}

// rows [N, D], scale [D], bias [D] of a layer norm (or anything, for none) -> [N, D].
XLA_FFI_Error* norm(Call call) {
  auto shape = call.shape(0);
  const float* bias = call.setting<bool>("centred") ? call.values<float>(2) : nullptr;
  Norm kernel{call.values<float>(0), call.values<float>(1), shape[0], shape[1], call.setting<float>("eps"), call.results<float>(0), 1, bias};
  return call.run(kernel);
}

// scores [N, E], bias [E] (or one value, for none) -> ids [N, K], weights [N, K].
XLA_FFI_Error* router(Call call) {
  auto shape = call.shape(0);
  Router kernel;
  kernel.scores = call.values<float>(0);
  kernel.bias = call.setting<bool>("biased") ? call.values<float>(1) : nullptr;
  kernel.ids = call.results<int32_t>(0), kernel.weights = call.results<float>(1);
  kernel.N = shape[0], kernel.E = shape[1], kernel.K = call.result(0).shape()[1];
  kernel.groups = call.setting<int64_t>("groups"), kernel.kept = call.setting<int64_t>("kept"), kernel.best = call.setting<int64_t>("best");
  kernel.normalised = call.setting<bool>("normalised"), kernel.factor = call.setting<float>("factor");
  return call.run(kernel);
}

// q_nope [R, C, H, N], q_rope [R, C, H, O], weights [L', M, H (N + U)], their scales [L', M / 128, H (N + U) / 128] (or one value, unless they
// are one byte wide), their layer [], latent [L, P, G, M], rope [L, P, G, O], the latents' scales [L, P, G, M / 128] (or one value, likewise),
// layer [], start [R], length [R], tables [R, Pr], filled [P, G] of one byte (or one value, where all is), chosen [R, C, Pr G / 32] (or one
// value, for all positions) -> [R, C, H, U]. The scale of the scores is one value [].
template <class Kernel>
XLA_FFI_Error* attention(Call call) {
  auto shape = call.shape(0), weights = call.shape(2), pages = call.shape(5);
  Kernel kernel;
  kernel.q_nope = call.values<float>(0);
  kernel.q_rope = call.values<float>(1);
  kernel.weights = {call.data(2), call.bytes_of(2), *call.values<int32_t>(4), weights[1], weights[2], call.values<float>(3)};
  kernel.R = shape[0], kernel.C = shape[1], kernel.H = shape[2];
  kernel.N = shape[3], kernel.O = call.shape(1)[3], kernel.U = call.result(0).shape()[3], kernel.M = pages[3];
  kernel.Pr = call.shape(11)[1];
  Cache& cache = kernel.cache;
  cache.latent = call.data(5);
  cache.bytes = call.bytes_of(5);
  cache.rope = call.data(6);
  cache.scale = call.values<float>(7);
  cache.layer = *call.values<int32_t>(8), cache.pages = pages[1], cache.G = pages[2];
  kernel.start = call.values<int32_t>(9);
  kernel.length = call.values<int32_t>(10);
  kernel.tables = call.values<int32_t>(11);
  kernel.filled = call.array(12).rank() == 2 ? call.values<uint8_t>(12) : nullptr;
  kernel.chosen = call.array(13).rank() == 3 ? call.values<uint32_t>(13) : nullptr;
  kernel.scale = call.setting<float>("scale");
  kernel.out = call.results<float>(0);
  return call.run(kernel);
}

// query [R, C, I, A], weight [R, C, I], keys [L, P, G, A], their scales [L, P, G, A / 128] (or one value, unless they are one byte wide),
// layer [], positions [R, C], tables [R, Pr], filled [P, G] of one byte (or one value, where all is) -> positions [R, C, k], count [R, C],
// words [R, C, S / 32].
XLA_FFI_Error* index_choice(Call call) {
  auto shape = call.shape(0), pages = call.shape(2);
  IndexChoice kernel;
  kernel.query = call.values<float>(0);
  kernel.weight = call.values<float>(1);
  kernel.keys = call.data(2);
  kernel.key_scale = call.values<float>(3);
  kernel.positions = call.values<int32_t>(5);
  kernel.tables = call.values<int32_t>(6);
  kernel.filled = call.array(7).rank() == 2 ? call.values<uint8_t>(7) : nullptr;
  kernel.bytes = call.setting<bool>("packed") ? 0 : call.bytes_of(2);
  kernel.layer = *call.values<int32_t>(4), kernel.pages = pages[1], kernel.G = pages[2];
  kernel.R = shape[0], kernel.C = shape[1], kernel.I = shape[2], kernel.A = shape[3];
  kernel.Pr = call.shape(6)[1], kernel.k = call.result(0).shape()[2];
  kernel.chosen = call.results<int32_t>(0);
  kernel.count = call.results<int32_t>(1);
  kernel.words = call.results<uint32_t>(2);
  return call.run(kernel);
}

// query [R, C, H, M], sink [H], window [L, W, G, *], entries [L', P, E, *] (or one value), their layers [] and [], positions [R, C], ring
// [R, Pw], tables [R, Pr], filled [W, G] of one byte (or one value, where all is), chosen [R, C, k] (or one value, for the first), their count
// [R, C] -> [R, C, H, M]. span: tokens of a window. scale: of the scores. rotated: values of an FP8 entry that are bfloat16; 0: vectors are float32.
XLA_FFI_Error* compressed_attention(Call call) {
  auto shape = call.shape(0), window = call.shape(2), entries = call.shape(3);
  CompressedAttention kernel;
  kernel.query = call.values<float>(0), kernel.sink = call.values<float>(1);
  const long rotated = call.setting<int64_t>("rotated");
  kernel.window = {rotated ? call.data(2) : call.values<float>(2), *call.values<int32_t>(4), window[1], window[2], rotated};
  kernel.entries = {rotated ? call.data(3) : call.values<float>(3), *call.values<int32_t>(5), 0, 1, rotated};
  if (call.array(3).rank() == 4) kernel.entries.pages = entries[1], kernel.entries.G = entries[2];
  kernel.R = shape[0], kernel.C = shape[1], kernel.H = shape[2], kernel.M = shape[3];
  kernel.positions = call.values<int32_t>(6);
  kernel.ring = call.values<int32_t>(7), kernel.Pw = call.shape(7)[1];
  kernel.tables = call.values<int32_t>(8), kernel.Pr = call.shape(8)[1];
  kernel.filled = call.array(9).rank() == 2 ? call.values<uint8_t>(9) : nullptr;
  const bool chooses = call.array(10).rank() == 3;
  kernel.chosen = chooses ? call.values<int32_t>(10) : nullptr, kernel.k = chooses ? call.shape(10)[2] : 0;
  kernel.count = call.values<int32_t>(11);
  kernel.span = call.setting<int64_t>("span"), kernel.scale = call.setting<float>("scale");
  kernel.out = call.results<float>(0);
  return call.run(kernel);
}

// x [N, n, D], weight [n D, w], base [w], factor [3] or [1] -> [N, D]; and where w is (2 + n) n, [N, n] and [N, n, n].
XLA_FFI_Error* streams(Call call) {
  auto shape = call.shape(0);
  Streams kernel;
  kernel.x = call.values<float>(0), kernel.weight = call.values<float>(1), kernel.base = call.values<float>(2);
  kernel.factor = call.values<float>(3);
  kernel.N = shape[0], kernel.n = shape[1], kernel.D = shape[2], kernel.w = call.shape(1)[1];
  kernel.rounds = call.setting<int64_t>("rounds");
  kernel.norm_eps = call.setting<float>("norm_eps"), kernel.eps = call.setting<float>("eps");
  kernel.read = call.results<float>(0);
  if (kernel.w != kernel.n) kernel.spread = call.results<float>(1), kernel.mixing = call.results<float>(2);
  return call.run(kernel);
}

// x [N, n, D], spread [N, n], mixing [N, n, n], y [N, D] -> [N, n, D].
XLA_FFI_Error* streams_after(Call call) {
  auto shape = call.shape(0);
  StreamsAfter kernel{call.values<float>(0), call.values<float>(1), call.values<float>(2), call.values<float>(3),
                      shape[0], shape[1], shape[2], call.results<float>(0), 1};
  return call.run(kernel);
}

// How a device goes on after a meeting: what `future` has promised XLA is kept, or has failed.
std::function<void(Outcome)> kept(const XLA_FFI_Api* api, XLA_FFI_Future* future, int64_t patience) {
  return [api, future, patience](Outcome outcome) {
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
  };
}

// Leaves word with XLA that a call is over when `future` is.
XLA_FFI_Error* promise(XLA_FFI_CallFrame* frame) {
  auto arguments = DSJAX_ARGUMENTS(XLA_FFI_Future_Create_Args);
  XLA_FFI_Error* found = frame->api->XLA_FFI_Future_Create(&arguments);
  if (found == nullptr) frame->future = arguments.future;
  return found;
}

// rows [N, W], this device's place in its group of `ranks`, [], and which of the groups it is, [] -> [N * ranks, W], every device's rows
// (gathers), or [N, W], where N / ranks rows are from each device.
XLA_FFI_Error* exchange_rows(XLA_FFI_CallFrame* frame) {
  Call call(frame);
  const Array out = call.result(0);
  const int64_t run = call.run_id();
  const int64_t ranks = call.setting<int64_t>("ranks");
  const int64_t patience = call.setting<int64_t>("patience");
  const bool gathers = call.setting<bool>("gathers");
  const Array rows = call.array(0);
  const int32_t *place = call.values<int32_t>(1), *group = call.values<int32_t>(2);
  // All that is looked at here is of the program, and the same on every device: where it does not fit, no device waits for another.
  if (!call.fits() || ranks < 1 || out.size() % ranks || rows.size() * (gathers ? ranks : 1) != out.size())
    return invalid(frame->api, "an exchange was given other arrays or settings than it takes");
  if (XLA_FFI_Error* found = promise(frame)) return found;
  const Part part{*place, static_cast<const char*>(rows.data()), static_cast<char*>(out.data()), kept(frame->api, frame->future, patience)};
  arrive_at_exchange(run, *group, ranks, out.size() / ranks, gathers, part, patience, call.pool());
  return nullptr;
}

// As `experts`, of `ranks` devices together: ids number the experts of all of them, `held` of each; and behind the weights this device's
// place in its group, [], and which of the groups it is, [] -> [N, D], and int32 [held + 1], counts as of `Guest`.
XLA_FFI_Error* experts_together(XLA_FFI_CallFrame* frame) {
  Call call(frame);
  const int64_t run = call.run_id();
  const int64_t ranks = call.setting<int64_t>("ranks"), held = call.setting<int64_t>("held"), together = call.setting<int64_t>("together");
  const int64_t patience = call.setting<int64_t>("patience");
  const int32_t *place = call.values<int32_t>(10), *group = call.values<int32_t>(11);
  float* out = call.results<float>(0);
  int32_t* counts = call.results<int32_t>(1);
  const Array memory = call.scratch();
  // As for `exchange_rows`: what does not fit here fits on no device.
  if (!call.fits() || ranks < 1 || held < 1) return invalid(frame->api, "experts were given other arrays or settings than they take");
  Experts experts = described_experts(call);
  experts.threads = static_cast<int>(call.setting<int64_t>("threads"));
  const bool holds = held <= experts.X && call.result(1).elements() == static_cast<size_t>(held) + 1;
  const bool reads = call.array(7).type() == XLA_FFI_DataType_F32 && call.array(9).elements() == call.array(8).elements() &&
                     call.result(0).elements() == static_cast<size_t>(experts.N * experts.D) && experts.row_stride >= experts.D;
  if (!call.fits() || !holds || !reads || memory.size() < sizeof(float) * experts.N * experts.K * experts.D)
    return invalid(frame->api, "experts were given other settings, or less working memory, than they need");
  if (XLA_FFI_Error* found = promise(frame)) return found;
  float* terms = static_cast<float*>(memory.data());
  const Guest guest{*place, held, experts, terms, out, counts, kept(frame->api, frame->future, patience)};
  arrive_together(run, *group, ranks, guest, patience, static_cast<int>(together), call.pool());
  return nullptr;
}

// A call of XLA's: to be told which version of its interface this is written for, or to compute.
XLA_FFI_Error* answer(XLA_FFI_CallFrame* frame, XLA_FFI_Error* (*compute)(XLA_FFI_CallFrame*)) {
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
  return compute(frame);
}

template <XLA_FFI_Error* (*kernel)(Call)>
XLA_FFI_Error* called(XLA_FFI_CallFrame* frame) {
  return kernel(Call(frame));
}

}  // namespace
}  // namespace dsjax

#define DSJAX_HANDLER(name, ...) \
  extern "C" XLA_FFI_Error* dsjax_##name(XLA_FFI_CallFrame* frame) { return dsjax::answer(frame, __VA_ARGS__); }
DSJAX_HANDLER(experts, dsjax::called<dsjax::experts>)
DSJAX_HANDLER(dense, dsjax::called<dsjax::dense>)
DSJAX_HANDLER(norm, dsjax::called<dsjax::norm>)
DSJAX_HANDLER(router, dsjax::called<dsjax::router>)
DSJAX_HANDLER(absorbed_attention, dsjax::called<dsjax::attention<dsjax::AbsorbedAttention>>)
DSJAX_HANDLER(expanded_attention, dsjax::called<dsjax::attention<dsjax::ExpandedAttention>>)
DSJAX_HANDLER(index_choice, dsjax::called<dsjax::index_choice>)
DSJAX_HANDLER(compressed_attention, dsjax::called<dsjax::compressed_attention>)
DSJAX_HANDLER(streams, dsjax::called<dsjax::streams>)
DSJAX_HANDLER(streams_after, dsjax::called<dsjax::streams_after>)
DSJAX_HANDLER(exchange, dsjax::exchange_rows)
DSJAX_HANDLER(experts_together, dsjax::experts_together)

// Bytes of working memory, by the numbers that a kernel's own fields of these names hold.
extern "C" int64_t dsjax_experts_scratch(int64_t X, int64_t D, int64_t F, int64_t N, int64_t K, int64_t bytes, int64_t apart, int64_t threads) {
  dsjax::Experts kernel{};
  kernel.X = X, kernel.D = D, kernel.F = F, kernel.N = N, kernel.K = K, kernel.bytes = static_cast<int>(bytes), kernel.apart = apart;
  kernel.threads = static_cast<int>(threads);
  return static_cast<int64_t>(kernel.scratch_bytes());
}
extern "C" int64_t dsjax_dense_scratch(int64_t N, int64_t threads) {
  dsjax::Dense kernel{};
  kernel.N = N, kernel.threads = static_cast<int>(threads);
  return static_cast<int64_t>(kernel.scratch_bytes());
}
extern "C" int64_t dsjax_exchange_scratch(int64_t) { return 0; }
extern "C" int64_t dsjax_experts_together_scratch(int64_t N, int64_t K, int64_t D, int64_t) { return sizeof(float) * N * K * D; }
extern "C" int64_t dsjax_experts_together_desks() { return dsjax::desks_of_experts(); }
extern "C" int64_t dsjax_norm_scratch(int64_t) { return static_cast<int64_t>(dsjax::Norm{}.scratch_bytes()); }
extern "C" int64_t dsjax_router_scratch(int64_t E, int64_t groups, int64_t threads) {
  dsjax::Router kernel{};
  kernel.E = E, kernel.groups = groups, kernel.threads = static_cast<int>(threads);
  return static_cast<int64_t>(kernel.scratch_bytes());
}

template <class Kernel>
static int64_t attention_scratch(int64_t R, int64_t C, int64_t H, int64_t N, int64_t O, int64_t U, int64_t M, int64_t bytes,
                                 int64_t threads) {
  Kernel kernel{};
  kernel.R = R, kernel.C = C, kernel.H = H, kernel.N = N, kernel.O = O, kernel.U = U, kernel.M = M;
  kernel.cache.bytes = static_cast<int>(bytes);
  kernel.threads = static_cast<int>(threads);
  return static_cast<int64_t>(kernel.scratch_bytes());
}
extern "C" int64_t dsjax_absorbed_attention_scratch(int64_t R, int64_t C, int64_t H, int64_t N, int64_t O, int64_t U, int64_t M,
                                                    int64_t bytes, int64_t threads) {
  return attention_scratch<dsjax::AbsorbedAttention>(R, C, H, N, O, U, M, bytes, threads);
}
extern "C" int64_t dsjax_expanded_attention_scratch(int64_t R, int64_t C, int64_t H, int64_t N, int64_t O, int64_t U, int64_t M,
                                                    int64_t bytes, int64_t threads) {
  return attention_scratch<dsjax::ExpandedAttention>(R, C, H, N, O, U, M, bytes, threads);
}

extern "C" int64_t dsjax_index_choice_scratch(int64_t R, int64_t C, int64_t I, int64_t A, int64_t Pr, int64_t G, int64_t threads) {
  dsjax::IndexChoice kernel{};
  kernel.R = R, kernel.C = C, kernel.I = I, kernel.A = A, kernel.Pr = Pr, kernel.G = G, kernel.threads = static_cast<int>(threads);
  return static_cast<int64_t>(kernel.scratch_bytes());
}
extern "C" int64_t dsjax_compressed_attention_scratch(int64_t H, int64_t M, int64_t rotated, int64_t threads) {
  dsjax::CompressedAttention kernel{};
  kernel.H = H, kernel.M = M, kernel.window.rotated = rotated, kernel.threads = static_cast<int>(threads);
  return static_cast<int64_t>(kernel.scratch_bytes());
}
extern "C" int64_t dsjax_streams_scratch(int64_t n, int64_t D, int64_t w, int64_t threads) {
  dsjax::Streams kernel{};
  kernel.n = n, kernel.D = D, kernel.w = w, kernel.threads = static_cast<int>(threads);
  return static_cast<int64_t>(kernel.scratch_bytes());
}
extern "C" int64_t dsjax_streams_after_scratch(int64_t) { return static_cast<int64_t>(dsjax::StreamsAfter{}.scratch_bytes()); }
