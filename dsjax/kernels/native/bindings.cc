// The kernels as XLA custom calls on the CPU platform (XLA FFI, the headers that jaxlib brings).
#include "attention.h"
#include "dense.h"
#include "exchange.h"
#include "experts.h"
#include "index.h"
#include "together.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace dsjax {
namespace {

// What a kernel is called with: arrays in the order, and settings by the names, of dsjax/kernels/native_calls.py. The last result of a
// call is its working memory, so that XLA plans it with all other buffers; its size comes from the functions at the end of this file.
//
// One form for all calls: as functions of typed arguments, which FFI offers too, they take a compiler three times as long.
class Call {
 public:
  Call(ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Dictionary settings) : args_(args), results_(results), settings_(settings) {}

  ffi::AnyBuffer array(size_t index) { return checked(args_.get<ffi::AnyBuffer>(index), none()); }
  ffi::Span<const int64_t> shape(size_t index) { return array(index).dimensions(); }
  // Bytes of an element.
  int bytes_of(size_t index) { return static_cast<int>(ffi::ByteWidth(array(index).element_type())); }
  const void* data(size_t index) { return array(index).untyped_data(); }
  template <class T>
  const T* values(size_t index) {
    return static_cast<const T*>(typed<T>(array(index)).untyped_data());
  }
  ffi::AnyBuffer result(size_t index) { return *checked(results_.get<ffi::AnyBuffer>(index), ffi::Result<ffi::AnyBuffer>(none())); }
  template <class T>
  T* results(size_t index) {
    return static_cast<T*>(typed<T>(result(index)).untyped_data());
  }
  ffi::AnyBuffer scratch() { return result(results_.size() - 1); }
  template <class T>
  T setting(const char* name) {
    return checked(settings_.get<T>(name), T());
  }

  // Runs a kernel with XLA's own threads, as many as it was told when it was traced.
  template <class Kernel>
  ffi::Error run(Kernel kernel, ffi::ThreadPool& pool) {
    kernel.threads = static_cast<int>(setting<int64_t>("threads"));
    const ffi::AnyBuffer memory = scratch();
    if (!fits_) return ffi::Error(ffi::ErrorCode::kInvalidArgument, "a native kernel was given other arrays or settings than it takes");
    if (memory.size_bytes() < kernel.scratch_bytes())
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, "a native kernel was given less working memory than it needs");
    run_kernel(kernel, static_cast<char*>(memory.untyped_data()), [&](std::function<void()> task) { pool.Schedule(std::move(task)); });
    return ffi::Error::Success();
  }

  // Whether everything that was asked for is there, with the type that was asked for.
  bool fits() const { return fits_; }

 private:
  template <class T>
  T checked(const ffi::ErrorOr<T>& given, T otherwise) {
    fits_ = fits_ && given.has_value();
    return given.has_value() ? given.value() : otherwise;
  }
  static ffi::AnyBuffer none() {
    static XLA_FFI_Buffer nothing{};
    return ffi::AnyBuffer(&nothing);
  }
  template <class T>
  ffi::AnyBuffer typed(ffi::AnyBuffer array) {
    const ffi::DataType type = std::is_same_v<T, float> ? ffi::F32 : std::is_same_v<T, int32_t> ? ffi::S32 : std::is_same_v<T, uint32_t> ? ffi::U32 : ffi::U8;
    fits_ = fits_ && array.element_type() == type;
    return array;
  }

  ffi::RemainingArgs args_;
  ffi::RemainingRets results_;
  ffi::Dictionary settings_;
  bool fits_ = true;
};

// gate_up [L, X, D, 2, F], down [L, X, F, D], their scales (or anything, unless the weights are one byte wide), scales of whole
// matrices in NVFP4, [L, X, 2, 1] and [L, X, 1] (or one value), layer [], all with D or F halved along the depth in FP4 (fp4_block not 0),
// rows [N, W >= D] of 4 bytes an element, ids [N, K], weights [N, K] -> [N, D], or [N, K, D]: the terms of each sum apart.
Experts described_experts(Call& call) {
  auto shape = call.shape(0), table = call.shape(8);
  const int64_t fp4_block = call.setting<int64_t>("fp4_block");
  const bool wholes = fp4_block && call.shape(4).size() == 4;
  Experts kernel;
  kernel.gate_up = call.data(0);
  kernel.down = call.data(1);
  kernel.gate_up_scale = call.data(2);
  kernel.down_scale = call.data(3);
  kernel.bytes = call.bytes_of(0);
  kernel.layer = *call.values<int32_t>(6);
  kernel.X = shape[1], kernel.D = shape[2] * (fp4_block ? 2 : 1), kernel.F = shape[4];
  kernel.fp4_block = fp4_block;
  kernel.hidden_format = static_cast<Hidden>(call.setting<int64_t>("hidden")), kernel.powers = call.setting<bool>("powers");
  kernel.gate_up_whole = wholes ? call.values<float>(4) : nullptr;
  kernel.down_whole = wholes ? call.values<float>(5) : nullptr;
  kernel.rows = static_cast<const float*>(call.data(7));
  kernel.row_stride = call.shape(7)[1];
  kernel.ids = call.values<int32_t>(8);
  kernel.weights = call.values<float>(9);
  kernel.N = table[0], kernel.K = table[1];
  kernel.out = call.results<float>(0);
  kernel.pieces = call.setting<int64_t>("pieces"), kernel.apart = call.result(0).dimensions().size() == 3;
  return kernel;
}

ffi::Error experts(ffi::ThreadPool pool, Call call) { return call.run(described_experts(call), pool); }

// weight [L, K, J] or [L, K, 2, J], or transposed [L, J, K]; its scales (or anything, unless it is one byte wide), layer [], rows [N, K]
// -> [N, J] or [N, 2, J].
ffi::Error dense(ffi::ThreadPool pool, Call call) {
  auto shape = call.shape(0), rows = call.shape(3);
  Dense kernel;
  kernel.weight = call.data(0);
  kernel.scale = static_cast<const float*>(call.data(1));
  kernel.bytes = call.bytes_of(0);
  kernel.transposed = call.setting<bool>("transposed");
  kernel.layer = *call.values<int32_t>(2);
  kernel.K = rows[1], kernel.parts = shape.size() == 4 ? shape[2] : 1;
  kernel.width = kernel.transposed ? shape[1] : shape[shape.size() - 1];
  kernel.pieces = call.setting<int64_t>("pieces");
  kernel.x = call.values<float>(3), kernel.N = rows[0];
  kernel.out = call.results<float>(0);
  return call.run(kernel, pool);
}

// rows [N, D], scale [D], bias [D] of a layer norm (or anything, for none) -> [N, D].
ffi::Error norm(ffi::ThreadPool pool, Call call) {
  auto shape = call.shape(0);
  const float* bias = call.setting<bool>("centred") ? call.values<float>(2) : nullptr;
  Norm kernel{call.values<float>(0), call.values<float>(1), shape[0], shape[1], call.setting<float>("eps"), call.results<float>(0), 1, bias};
  return call.run(kernel, pool);
}

// q_nope [R, C, H, N or M], q_rope [R, C, H, O], weights [M, H, N + U] (or one value, for none), latent [L, P, G, M], rope
// [L, P, G, O] (the joined layout gives the same array twice: [L, P, G, M + O]), the latents' scales [L, P, G, M / 128] (or one value,
// unless they are one byte wide), layer [], start [R], length [R],
// tables [R, Pr], filled [P, G] of one byte (or one value, where all is), chosen [R, C, Pr G / 32] (or one value, for all positions)
// -> [R, C, H, U or M]. The scale of the scores is one value []. A cache by head: keys [L, P, G, H, N + O] and values [L, P, G, H, U].
template <class Kernel>
ffi::Error attention(ffi::ThreadPool pool, Call call) {
  auto shape = call.shape(0), pages = call.shape(3), rope = call.shape(4);
  const int64_t latent_width = call.setting<int64_t>("latent_width");
  const bool by_head = pages.size() == 5, absorbs = call.shape(2).size() == 3, joined = !by_head && pages[3] != latent_width;
  Kernel kernel;
  kernel.q_nope = call.values<float>(0);
  kernel.q_rope = call.values<float>(1);
  kernel.weights = absorbs ? call.values<float>(2) : nullptr;
  kernel.R = shape[0], kernel.C = shape[1], kernel.H = shape[2];
  kernel.O = call.shape(1)[3], kernel.M = latent_width;
  kernel.N = absorbs || by_head ? shape[3] : 0, kernel.U = absorbs || by_head ? call.result(0).dimensions()[3] : 0;
  kernel.Pr = call.shape(9)[1];
  Cache& cache = kernel.cache;
  cache.latent = call.data(3);
  cache.bytes = call.bytes_of(3);
  cache.rope = static_cast<const char*>(call.data(4)) + (joined ? latent_width * cache.bytes : 0);
  cache.by_head = by_head;
  cache.latent_stride = by_head ? pages[3] * pages[4] : pages[3];
  cache.rope_stride = by_head ? pages[3] * rope[4] : rope[3];
  cache.scale = call.values<float>(5);
  cache.layer = *call.values<int32_t>(6), cache.pages = pages[1], cache.G = pages[2];
  kernel.start = call.values<int32_t>(7);
  kernel.length = call.values<int32_t>(8);
  kernel.tables = call.values<int32_t>(9);
  kernel.filled = call.shape(10).size() == 2 ? call.values<uint8_t>(10) : nullptr;
  kernel.chosen = call.shape(11).size() == 3 ? call.values<uint32_t>(11) : nullptr;
  kernel.scale = call.setting<float>("scale");
  kernel.out = call.results<float>(0);
  return call.run(kernel, pool);
}

// query [R, C, I, A], weight [R, C, I], keys [L, P, G, A], their scales [L, P, G, A / 128] (or one value, unless they are one byte wide),
// layer [], positions [R, C], tables [R, Pr], filled [P, G] of one byte (or one value, where all is) -> positions [R, C, k], count [R, C],
// words [R, C, S / 32].
ffi::Error index_choice(ffi::ThreadPool pool, Call call) {
  auto shape = call.shape(0), pages = call.shape(2);
  IndexChoice kernel;
  kernel.query = call.values<float>(0);
  kernel.weight = call.values<float>(1);
  kernel.keys = call.data(2);
  kernel.key_scale = call.values<float>(3);
  kernel.positions = call.values<int32_t>(5);
  kernel.tables = call.values<int32_t>(6);
  kernel.filled = call.shape(7).size() == 2 ? call.values<uint8_t>(7) : nullptr;
  kernel.bytes = call.bytes_of(2);
  kernel.layer = *call.values<int32_t>(4), kernel.pages = pages[1], kernel.G = pages[2];
  kernel.R = shape[0], kernel.C = shape[1], kernel.I = shape[2], kernel.A = shape[3];
  kernel.Pr = call.shape(6)[1], kernel.k = call.result(0).dimensions()[2];
  kernel.chosen = call.results<int32_t>(0);
  kernel.count = call.results<int32_t>(1);
  kernel.words = call.results<uint32_t>(2);
  return call.run(kernel, pool);
}

// How a device goes on after a meeting: what it promised XLA is kept, or has failed.
std::function<void(Outcome)> kept(ffi::Promise promise, int64_t patience) {
  return [promise, patience](Outcome outcome) mutable {
    if (outcome == Outcome::met) return promise.SetAvailable();
    if (outcome == Outcome::late)
      return promise.SetError(ffi::Error(ffi::ErrorCode::kDeadlineExceeded, "a device did not come to an exchange with the others in " +
                                                                                std::to_string(patience) + " s; its step may have failed"));
    if (outcome == Outcome::no_memory)
      return promise.SetError(ffi::Error(ffi::ErrorCode::kResourceExhausted, "there is no memory for what experts of a device are to compute"));
    promise.SetError(ffi::Error(ffi::ErrorCode::kInvalidArgument,
                                "the devices of an exchange had not the places 0 to ranks - 1, each of them once"));
  };
}

// rows [N, W], this device's place in its group of `ranks`, [], and which of the groups it is, [] -> [N * ranks, W], every device's rows
// (gathers), or [N, W], where N / ranks rows are from each device.
ffi::Future exchange_rows(ffi::RunId run, ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Dictionary settings) {
  Call call(args, results, settings);
  ffi::Promise promise;
  ffi::Future future(promise);
  const ffi::AnyBuffer out = call.result(0);
  const int64_t ranks = call.setting<int64_t>("ranks");
  const int64_t patience = call.setting<int64_t>("patience");
  const bool gathers = call.setting<bool>("gathers");
  const ffi::AnyBuffer rows = call.array(0);
  const int32_t *place = call.values<int32_t>(1), *group = call.values<int32_t>(2);
  // All that is looked at here is of the program, and the same on every device: where it does not fit, no device waits for another.
  if (!call.fits() || ranks < 1 || out.size_bytes() % ranks || rows.size_bytes() * (gathers ? ranks : 1) != out.size_bytes()) {
    promise.SetError(ffi::Error(ffi::ErrorCode::kInvalidArgument, "an exchange was given other arrays or settings than it takes"));
    return future;
  }
  Exchange::arrive(run.run_id, *group, ranks, out.size_bytes() / ranks, gathers,
                   Part{*place, static_cast<const char*>(rows.untyped_data()), static_cast<char*>(out.untyped_data()), kept(promise, patience)},
                   patience, [&](std::function<void()> task) { pool.Schedule(std::move(task)); });
  return future;
}

// As `experts`, of `ranks` devices together: ids number the experts of all of them, `held` of each; and behind the weights this device's
// place in its group, [], and which of the groups it is, [] -> [N, D], and int32 [held + 1], counts as of `Guest`.
ffi::Future experts_together(ffi::RunId run, ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Dictionary settings) {
  Call call(args, results, settings);
  ffi::Promise promise;
  ffi::Future future(promise);
  const int64_t ranks = call.setting<int64_t>("ranks"), held = call.setting<int64_t>("held"), together = call.setting<int64_t>("together");
  const int64_t patience = call.setting<int64_t>("patience");
  const int32_t *place = call.values<int32_t>(10), *group = call.values<int32_t>(11);
  float* out = call.results<float>(0);
  int32_t* counts = call.results<int32_t>(1);
  const ffi::AnyBuffer memory = call.scratch();
  // As for `exchange_rows`: what does not fit here fits on no device.
  if (!call.fits() || ranks < 1 || held < 1) {
    promise.SetError(ffi::Error(ffi::ErrorCode::kInvalidArgument, "experts were given other arrays or settings than they take"));
    return future;
  }
  Experts experts = described_experts(call);
  experts.threads = static_cast<int>(call.setting<int64_t>("threads"));
  const bool holds = held <= experts.X && call.result(1).element_count() == static_cast<size_t>(held) + 1;
  const bool reads = call.array(7).element_type() == ffi::F32 && call.array(9).element_count() == call.array(8).element_count() &&
                     call.result(0).element_count() == static_cast<size_t>(experts.N * experts.D) && experts.row_stride >= experts.D;
  if (!call.fits() || !holds || !reads || memory.size_bytes() < sizeof(float) * experts.N * experts.K * experts.D) {
    promise.SetError(ffi::Error(ffi::ErrorCode::kInvalidArgument, "experts were given other settings, or less working memory, than they need"));
    return future;
  }
  float* terms = static_cast<float*>(memory.untyped_data());
  Together::arrive(run.run_id, *group, ranks, Guest{*place, held, experts, terms, out, counts, kept(promise, patience)}, patience, static_cast<int>(together),
                   [&](std::function<void()> task) { pool.Schedule(std::move(task)); });
  return future;
}

typedef ffi::Error (*Kernel)(ffi::ThreadPool, Call);

// One function type for all, so that FFI's templates are compiled once.
template <Kernel kernel>
ffi::Error called(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Dictionary settings) {
  return kernel(pool, Call(args, results, settings));
}
inline auto binding() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs(); }

}  // namespace
}  // namespace dsjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(dsjax_experts, dsjax::called<dsjax::experts>, dsjax::binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dsjax_dense, dsjax::called<dsjax::dense>, dsjax::binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dsjax_norm, dsjax::called<dsjax::norm>, dsjax::binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dsjax_absorbed_attention, dsjax::called<dsjax::attention<dsjax::AbsorbedAttention>>, dsjax::binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dsjax_expanded_attention, dsjax::called<dsjax::attention<dsjax::ExpandedAttention>>, dsjax::binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dsjax_index_choice, dsjax::called<dsjax::index_choice>, dsjax::binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    dsjax_exchange, dsjax::exchange_rows,
    ffi::Ffi::Bind().Ctx<ffi::RunId>().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    dsjax_experts_together, dsjax::experts_together,
    ffi::Ffi::Bind().Ctx<ffi::RunId>().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

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
extern "C" int64_t dsjax_experts_together_desks() { return dsjax::Together::desks(); }
extern "C" int64_t dsjax_norm_scratch(int64_t) { return static_cast<int64_t>(dsjax::Norm{}.scratch_bytes()); }

template <class Kernel>
static int64_t attention_scratch(int64_t R, int64_t C, int64_t H, int64_t N, int64_t O, int64_t U, int64_t M, int64_t bytes,
                                 int64_t absorbs, int64_t by_head, int64_t threads) {
  static const float some = 0;
  Kernel kernel{};
  kernel.R = R, kernel.C = C, kernel.H = H, kernel.N = N, kernel.O = O, kernel.U = U, kernel.M = M;
  kernel.cache.bytes = static_cast<int>(bytes);
  kernel.cache.by_head = by_head;
  kernel.weights = absorbs ? &some : nullptr;
  kernel.threads = static_cast<int>(threads);
  return static_cast<int64_t>(kernel.scratch_bytes());
}
extern "C" int64_t dsjax_absorbed_attention_scratch(int64_t R, int64_t C, int64_t H, int64_t N, int64_t O, int64_t U, int64_t M,
                                                    int64_t bytes, int64_t absorbs, int64_t by_head, int64_t threads) {
  return attention_scratch<dsjax::AbsorbedAttention>(R, C, H, N, O, U, M, bytes, absorbs, by_head, threads);
}
extern "C" int64_t dsjax_expanded_attention_scratch(int64_t R, int64_t C, int64_t H, int64_t N, int64_t O, int64_t U, int64_t M,
                                                    int64_t bytes, int64_t absorbs, int64_t by_head, int64_t threads) {
  return attention_scratch<dsjax::ExpandedAttention>(R, C, H, N, O, U, M, bytes, absorbs, by_head, threads);
}

extern "C" int64_t dsjax_index_choice_scratch(int64_t R, int64_t C, int64_t I, int64_t A, int64_t Pr, int64_t G, int64_t threads) {
  dsjax::IndexChoice kernel{};
  kernel.R = R, kernel.C = C, kernel.I = I, kernel.A = A, kernel.Pr = Pr, kernel.G = G, kernel.threads = static_cast<int>(threads);
  return static_cast<int64_t>(kernel.scratch_bytes());
}
