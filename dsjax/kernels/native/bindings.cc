// The kernels as XLA custom calls on the CPU platform (XLA FFI, the headers that jaxlib brings).
#include "attention.h"
#include "experts.h"
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

// gate_up [L, X, D, 2, F], down [L, X, F, D], their scales (or anything, unless the weights are one byte wide), layer [],
// rows [N, W >= D] of 4 bytes an element, ids [N, K], weights [N, K] -> [N, D].
ffi::Error experts(ffi::ThreadPool pool, ffi::AnyBuffer gate_up, ffi::AnyBuffer down,
                   ffi::AnyBuffer gate_up_scale, ffi::AnyBuffer down_scale, ffi::Buffer<ffi::S32> layer, ffi::AnyBuffer rows,
                   ffi::Buffer<ffi::S32> ids, ffi::Buffer<ffi::F32> weights, ffi::ResultBuffer<ffi::F32> out, ffi::Result<ffi::AnyBuffer> scratch,
                   int64_t threads) {
  auto shape = gate_up.dimensions(), table = ids.dimensions();
  Experts kernel;
  kernel.gate_up = gate_up.untyped_data();
  kernel.down = down.untyped_data();
  kernel.gate_up_scale = static_cast<const float*>(gate_up_scale.untyped_data());
  kernel.down_scale = static_cast<const float*>(down_scale.untyped_data());
  kernel.bytes = bytes_of(gate_up);
  kernel.layer = *layer.typed_data();
  kernel.X = shape[1], kernel.D = shape[2], kernel.F = shape[4];
  kernel.rows = static_cast<const float*>(rows.untyped_data());
  kernel.row_stride = rows.dimensions()[1];
  kernel.ids = ids.typed_data();
  kernel.weights = weights.typed_data();
  kernel.N = table[0], kernel.K = table[1];
  kernel.out = out->typed_data();
  return run(kernel, threads, scratch, pool);
}

// q_nope [R, C, H, N or M], q_rope [R, C, H, O], weights [M, H, N + U] (or one value, for none), latent [L, P, G, M], rope
// [L, P, G, O] (the joined layout gives the same array twice: [L, P, G, M + O]), the latents' scales [L, P, G, M / 128] (or one value,
// unless they are one byte wide), layer [], start [R], length [R],
// tables [R, Pr], filled [P, G] of one byte (or one value, where all is) -> [R, C, H, U or M]. The scale of the scores is one value [].
template <class Kernel>
ffi::Error attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q_nope,
                     ffi::Buffer<ffi::F32> q_rope, ffi::Buffer<ffi::F32> weights, ffi::AnyBuffer latent, ffi::AnyBuffer rope,
                     ffi::Buffer<ffi::F32> latent_scale, ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> start, ffi::Buffer<ffi::S32> length,
                     ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::U8> filled, ffi::ResultBuffer<ffi::F32> out, ffi::Result<ffi::AnyBuffer> scratch,
                     int64_t threads, int64_t latent_width, float scale) {
  auto shape = q_nope.dimensions(), pages = latent.dimensions();
  const bool absorbs = weights.dimensions().size() == 3, joined = pages[3] != latent_width;
  Kernel kernel;
  kernel.q_nope = q_nope.typed_data();
  kernel.q_rope = q_rope.typed_data();
  kernel.weights = absorbs ? weights.typed_data() : nullptr;
  kernel.R = shape[0], kernel.C = shape[1], kernel.H = shape[2];
  kernel.O = q_rope.dimensions()[3], kernel.M = latent_width;
  kernel.N = absorbs ? shape[3] : 0, kernel.U = absorbs ? out->dimensions()[3] : 0;
  kernel.Pr = tables.dimensions()[1];
  Cache& cache = kernel.cache;
  cache.latent = latent.untyped_data();
  cache.bytes = bytes_of(latent);
  cache.rope = static_cast<const char*>(rope.untyped_data()) + (joined ? latent_width * cache.bytes : 0);
  cache.latent_stride = pages[3], cache.rope_stride = rope.dimensions()[3];
  cache.scale = latent_scale.typed_data();
  cache.layer = *layer.typed_data(), cache.pages = pages[1], cache.G = pages[2];
  kernel.start = start.typed_data();
  kernel.length = length.typed_data();
  kernel.tables = tables.typed_data();
  kernel.filled = filled.dimensions().size() == 2 ? filled.typed_data() : nullptr;
  kernel.scale = scale;
  kernel.out = out->typed_data();
  return run(kernel, threads, scratch, pool);
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
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
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
extern "C" int64_t dsjax_experts_scratch(int64_t X, int64_t D, int64_t F, int64_t N, int64_t K, int64_t threads) {
  dsjax::Experts kernel{};
  kernel.X = X, kernel.D = D, kernel.F = F, kernel.N = N, kernel.K = K, kernel.threads = static_cast<int>(threads);
  return static_cast<int64_t>(kernel.scratch_bytes());
}

template <class Kernel>
static int64_t attention_scratch(int64_t R, int64_t C, int64_t H, int64_t N, int64_t O, int64_t U, int64_t M, int64_t bytes,
                                 int64_t absorbs, int64_t threads) {
  static const float some = 0;
  Kernel kernel{};
  kernel.R = R, kernel.C = C, kernel.H = H, kernel.N = N, kernel.O = O, kernel.U = U, kernel.M = M;
  kernel.cache.bytes = static_cast<int>(bytes);
  kernel.weights = absorbs ? &some : nullptr;
  kernel.threads = static_cast<int>(threads);
  return static_cast<int64_t>(kernel.scratch_bytes());
}
extern "C" int64_t dsjax_absorbed_attention_scratch(int64_t R, int64_t C, int64_t H, int64_t N, int64_t O, int64_t U, int64_t M,
                                                    int64_t bytes, int64_t absorbs, int64_t threads) {
  return attention_scratch<dsjax::AbsorbedAttention>(R, C, H, N, O, U, M, bytes, absorbs, threads);
}
extern "C" int64_t dsjax_expanded_attention_scratch(int64_t R, int64_t C, int64_t H, int64_t N, int64_t O, int64_t U, int64_t M,
                                                    int64_t bytes, int64_t absorbs, int64_t threads) {
  return attention_scratch<dsjax::ExpandedAttention>(R, C, H, N, O, U, M, bytes, absorbs, threads);
}

extern "C" int dsjax_self_test() { return dsjax::SelfTest().run(); }
