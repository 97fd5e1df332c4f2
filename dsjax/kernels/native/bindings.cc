// The kernels as XLA custom calls on the CPU platform (XLA FFI, the headers that jaxlib brings).
#include "attention.h"
#include "dense.h"
#include "exchange.h"
#include "experts.h"
#include "index.h"
#include "self_test.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace dsjax {
namespace {

int bytes_of(const ffi::AnyBuffer& buffer) { return static_cast<int>(ffi::ByteWidth(buffer.element_type())); }

// Runs a kernel with XLA's own threads, as many as it was told when it was traced. Its working memory is a second result of
// the call, so that XLA plans it with all other buffers; its size comes from the functions at the end of this file.
template <class Kernel>
ffi::Error run(Kernel kernel, int64_t threads, ffi::Result<ffi::AnyBuffer> scratch, ffi::ThreadPool& pool) {
  kernel.threads = static_cast<int>(threads);
  if (scratch->size_bytes() < kernel.scratch_bytes())
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "a native kernel was given less working memory than it needs");
  kernel.run(static_cast<char*>(scratch->untyped_data()), [&](std::function<void()> task) { pool.Schedule(std::move(task)); });
  return ffi::Error::Success();
}

// gate_up [L, X, D, 2, F], down [L, X, F, D], their scales (or anything, unless the weights are one byte wide), scales of whole
// matrices in NVFP4, [L, X, 2, 1] and [L, X, 1] (or one value), layer [], all with D or F halved along the depth in FP4 (fp4_block not 0),
// rows [N, W >= D] of 4 bytes an element, ids [N, K], weights [N, K] -> [N, D], or [N, K, D]: the terms of each sum apart.
ffi::Error experts(ffi::ThreadPool pool, ffi::AnyBuffer gate_up, ffi::AnyBuffer down,
                   ffi::AnyBuffer gate_up_scale, ffi::AnyBuffer down_scale, ffi::Buffer<ffi::F32> gate_up_whole,
                   ffi::Buffer<ffi::F32> down_whole, ffi::Buffer<ffi::S32> layer, ffi::AnyBuffer rows,
                   ffi::Buffer<ffi::S32> ids, ffi::Buffer<ffi::F32> weights, ffi::ResultBuffer<ffi::F32> out, ffi::Result<ffi::AnyBuffer> scratch,
                   int64_t threads, int64_t pieces, int64_t fp4_block, int64_t hidden, bool powers) {
  auto shape = gate_up.dimensions(), table = ids.dimensions();
  const bool wholes = fp4_block && gate_up_whole.dimensions().size() == 4;
  Experts kernel;
  kernel.gate_up = gate_up.untyped_data();
  kernel.down = down.untyped_data();
  kernel.gate_up_scale = gate_up_scale.untyped_data();
  kernel.down_scale = down_scale.untyped_data();
  kernel.bytes = bytes_of(gate_up);
  kernel.layer = *layer.typed_data();
  kernel.X = shape[1], kernel.D = shape[2] * (fp4_block ? 2 : 1), kernel.F = shape[4];
  kernel.fp4_block = fp4_block;
  kernel.hidden_format = static_cast<Hidden>(hidden), kernel.powers = powers;
  kernel.gate_up_whole = wholes ? gate_up_whole.typed_data() : nullptr;
  kernel.down_whole = wholes ? down_whole.typed_data() : nullptr;
  kernel.rows = static_cast<const float*>(rows.untyped_data());
  kernel.row_stride = rows.dimensions()[1];
  kernel.ids = ids.typed_data();
  kernel.weights = weights.typed_data();
  kernel.N = table[0], kernel.K = table[1];
  kernel.out = out->typed_data();
  kernel.pieces = pieces, kernel.apart = out->dimensions().size() == 3;
  return run(kernel, threads, scratch, pool);
}

// weight [L, K, J] or [L, K, 2, J], or transposed [L, J, K]; its scales (or anything, unless it is one byte wide), layer [], rows [N, K]
// -> [N, J] or [N, 2, J].
ffi::Error dense(ffi::ThreadPool pool, ffi::AnyBuffer weight, ffi::AnyBuffer scale, ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::F32> rows,
                 ffi::ResultBuffer<ffi::F32> out, ffi::Result<ffi::AnyBuffer> scratch, int64_t threads, int64_t pieces, bool transposed) {
  auto shape = weight.dimensions();
  Dense kernel;
  kernel.weight = weight.untyped_data();
  kernel.scale = static_cast<const float*>(scale.untyped_data());
  kernel.bytes = bytes_of(weight);
  kernel.transposed = transposed;
  kernel.layer = *layer.typed_data();
  kernel.K = rows.dimensions()[1], kernel.parts = shape.size() == 4 ? shape[2] : 1, kernel.width = transposed ? shape[1] : shape[shape.size() - 1];
  kernel.pieces = pieces;
  kernel.x = rows.typed_data(), kernel.N = rows.dimensions()[0];
  kernel.out = out->typed_data();
  return run(kernel, threads, scratch, pool);
}

// rows [N, D], scale [D], bias [D] of a layer norm (or anything, for none) -> [N, D].
ffi::Error norm(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> rows, ffi::Buffer<ffi::F32> scale, ffi::Buffer<ffi::F32> bias,
                ffi::ResultBuffer<ffi::F32> out, ffi::Result<ffi::AnyBuffer> scratch, int64_t threads, float eps, bool centred) {
  auto shape = rows.dimensions();
  Norm kernel{rows.typed_data(), scale.typed_data(), shape[0], shape[1], eps, out->typed_data(), 1, centred ? bias.typed_data() : nullptr};
  return run(kernel, threads, scratch, pool);
}

// q_nope [R, C, H, N or M], q_rope [R, C, H, O], weights [M, H, N + U] (or one value, for none), latent [L, P, G, M], rope
// [L, P, G, O] (the joined layout gives the same array twice: [L, P, G, M + O]), the latents' scales [L, P, G, M / 128] (or one value,
// unless they are one byte wide), layer [], start [R], length [R],
// tables [R, Pr], filled [P, G] of one byte (or one value, where all is), chosen [R, C, Pr G / 32] (or one value, for all positions)
// -> [R, C, H, U or M]. The scale of the scores is one value []. A cache by head: keys [L, P, G, H, N + O] and values [L, P, G, H, U].
template <class Kernel>
ffi::Error attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q_nope,
                     ffi::Buffer<ffi::F32> q_rope, ffi::Buffer<ffi::F32> weights, ffi::AnyBuffer latent, ffi::AnyBuffer rope,
                     ffi::Buffer<ffi::F32> latent_scale, ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> start, ffi::Buffer<ffi::S32> length,
                     ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::U8> filled, ffi::Buffer<ffi::U32> chosen, ffi::ResultBuffer<ffi::F32> out,
                     ffi::Result<ffi::AnyBuffer> scratch, int64_t threads, int64_t latent_width, float scale) {
  auto shape = q_nope.dimensions(), pages = latent.dimensions();
  const bool by_head = pages.size() == 5, absorbs = weights.dimensions().size() == 3, joined = !by_head && pages[3] != latent_width;
  Kernel kernel;
  kernel.q_nope = q_nope.typed_data();
  kernel.q_rope = q_rope.typed_data();
  kernel.weights = absorbs ? weights.typed_data() : nullptr;
  kernel.R = shape[0], kernel.C = shape[1], kernel.H = shape[2];
  kernel.O = q_rope.dimensions()[3], kernel.M = latent_width;
  kernel.N = absorbs || by_head ? shape[3] : 0, kernel.U = absorbs || by_head ? out->dimensions()[3] : 0;
  kernel.Pr = tables.dimensions()[1];
  Cache& cache = kernel.cache;
  cache.latent = latent.untyped_data();
  cache.bytes = bytes_of(latent);
  cache.rope = static_cast<const char*>(rope.untyped_data()) + (joined ? latent_width * cache.bytes : 0);
  cache.by_head = by_head;
  cache.latent_stride = by_head ? pages[3] * pages[4] : pages[3];
  cache.rope_stride = by_head ? pages[3] * rope.dimensions()[4] : rope.dimensions()[3];
  cache.scale = latent_scale.typed_data();
  cache.layer = *layer.typed_data(), cache.pages = pages[1], cache.G = pages[2];
  kernel.start = start.typed_data();
  kernel.length = length.typed_data();
  kernel.tables = tables.typed_data();
  kernel.filled = filled.dimensions().size() == 2 ? filled.typed_data() : nullptr;
  kernel.chosen = chosen.dimensions().size() == 3 ? chosen.typed_data() : nullptr;
  kernel.scale = scale;
  kernel.out = out->typed_data();
  return run(kernel, threads, scratch, pool);
}

// query [R, C, I, A], weight [R, C, I], keys [L, P, G, A], their scales [L, P, G, A / 128] (or one value, unless they are one byte wide),
// layer [], positions [R, C], tables [R, Pr], filled [P, G] of one byte (or one value, where all is) -> positions [R, C, k], count [R, C],
// words [R, C, S / 32].
ffi::Error index_choice(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> query, ffi::Buffer<ffi::F32> weight, ffi::AnyBuffer keys,
                        ffi::Buffer<ffi::F32> key_scale, ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> positions,
                        ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::U8> filled, ffi::ResultBuffer<ffi::S32> chosen,
                        ffi::ResultBuffer<ffi::S32> count, ffi::ResultBuffer<ffi::U32> words, ffi::Result<ffi::AnyBuffer> scratch,
                        int64_t threads) {
  auto shape = query.dimensions(), pages = keys.dimensions();
  IndexChoice kernel;
  kernel.query = query.typed_data();
  kernel.weight = weight.typed_data();
  kernel.keys = keys.untyped_data();
  kernel.key_scale = key_scale.typed_data();
  kernel.positions = positions.typed_data();
  kernel.tables = tables.typed_data();
  kernel.filled = filled.dimensions().size() == 2 ? filled.typed_data() : nullptr;
  kernel.bytes = bytes_of(keys);
  kernel.layer = *layer.typed_data(), kernel.pages = pages[1], kernel.G = pages[2];
  kernel.R = shape[0], kernel.C = shape[1], kernel.I = shape[2], kernel.A = shape[3];
  kernel.Pr = tables.dimensions()[1], kernel.k = chosen->dimensions()[2];
  kernel.chosen = chosen->typed_data();
  kernel.count = count->typed_data();
  kernel.words = words->typed_data();
  return run(kernel, threads, scratch, pool);
}

// rows [N, W], this device's place in its group of `ranks`, [], and which of the groups it is, [] -> [N * ranks, W], every device's rows
// (gathers), or [N, W], where N / ranks rows are from each device.
ffi::Future exchange_rows(ffi::RunId run, ffi::ThreadPool pool, ffi::AnyBuffer rows, ffi::Buffer<ffi::S32> place, ffi::Buffer<ffi::S32> group,
                     ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer>, int64_t ranks, bool gathers) {
  ffi::Promise promise;
  ffi::Future future(promise);
  Part part{*place.typed_data(), static_cast<const char*>(rows.untyped_data()), static_cast<char*>(out->untyped_data()),
            [promise]() mutable { promise.SetAvailable(); }};
  Meetings::here().arrive(run.run_id, *group.typed_data(), ranks, out->size_bytes() / ranks, gathers, std::move(part),
                          [&](std::function<void()> task) { pool.Schedule(std::move(task)); });
  return future;
}

template <class Kernel>
constexpr auto bind_attention() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::Buffer<ffi::F32>>()
      .Arg<ffi::Buffer<ffi::F32>>()
      .Arg<ffi::Buffer<ffi::F32>>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::Buffer<ffi::F32>>()
      .Arg<ffi::Buffer<ffi::S32>>()
      .Arg<ffi::Buffer<ffi::S32>>()
      .Arg<ffi::Buffer<ffi::S32>>()
      .Arg<ffi::Buffer<ffi::S32>>()
      .Arg<ffi::Buffer<ffi::U8>>()
      .Arg<ffi::Buffer<ffi::U32>>()
      .Ret<ffi::Buffer<ffi::F32>>()
      .Ret<ffi::AnyBuffer>()
      .Attr<int64_t>("threads")
      .Attr<int64_t>("latent_width")
      .Attr<float>("scale")
      .To(attention<Kernel>);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(dsjax_experts, experts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("threads")
                                  .Attr<int64_t>("pieces")
                                  .Attr<int64_t>("fp4_block")
                                  .Attr<int64_t>("hidden")
                                  .Attr<bool>("powers"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(dsjax_dense, dense,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("threads")
                                  .Attr<int64_t>("pieces")
                                  .Attr<bool>("transposed"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(dsjax_norm, norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("threads")
                                  .Attr<float>("eps")
                                  .Attr<bool>("centred"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(dsjax_exchange, exchange_rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("ranks")
                                  .Attr<bool>("gathers"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(dsjax_index_choice, index_choice,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::U32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("threads"));

}  // namespace dsjax

extern "C" XLA_FFI_Error* dsjax_absorbed_attention(XLA_FFI_CallFrame* frame) {
  static auto* handler = dsjax::bind_attention<dsjax::AbsorbedAttention>().release();
  return handler->Call(frame);
}

extern "C" XLA_FFI_Error* dsjax_expanded_attention(XLA_FFI_CallFrame* frame) {
  static auto* handler = dsjax::bind_attention<dsjax::ExpandedAttention>().release();
  return handler->Call(frame);
}

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

extern "C" int dsjax_self_test() { return dsjax::SelfTest().run(); }
