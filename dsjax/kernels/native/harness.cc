// The kernels without XLA or Python: reads one case from standard input, writes its result to standard output. For sanitizers,
// which drown in other people's reports inside a JAX process. The case is in the machine's byte order:
//   int64 kernel (0 experts, 1 absorbed, 2 expanded attention), int64 threads, int64 count, `count` int64 sizes, float scale,
//   then the arrays, in the order that the kernel's fields are filled below.
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "attention.h"
#include "experts.h"

namespace {

using namespace dsjax;

template <class T>
std::vector<T> read(long count) {
  std::vector<T> values(count);
  if (std::fread(values.data(), sizeof(T), count, stdin) != static_cast<size_t>(count)) std::exit(3);
  return values;
}

// A thread for each task, begun at once: more disorder than a pool has.
struct Threads {
  std::mutex mutex;
  std::vector<std::thread> all;
  Schedule schedule() {
    return [this](std::function<void()> task) {
      std::lock_guard<std::mutex> lock(mutex);
      all.emplace_back(std::move(task));
    };
  }
  ~Threads() {
    for (std::thread& thread : all) thread.join();
  }
};

// Working memory of exactly the size that the kernel asks for, so that a byte more is found, and full of NaN.
template <class Kernel>
void run(Kernel& kernel, std::vector<float>& out) {
  const size_t bytes = kernel.scratch_bytes();
  char* scratch = static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
  std::fill(scratch, scratch + bytes, static_cast<char>(0xff));
  kernel.out = out.data();
  {
    Threads threads;
    kernel.run(scratch, threads.schedule());
  }
  std::free(scratch);
  std::fwrite(out.data(), sizeof(float), out.size(), stdout);
}

void experts(const std::vector<int64_t>& s, int threads) {
  Experts kernel{};
  const long layers = s[0], stride = s[7];
  kernel.X = s[1], kernel.D = s[2], kernel.F = s[3], kernel.N = s[4], kernel.K = s[5], kernel.bytes = static_cast<int>(s[6]);
  kernel.layer = layers - 1, kernel.row_stride = stride, kernel.threads = threads;
  auto blocks = [](long size) { return (size + kScaleBlock - 1) / kScaleBlock; };
  const bool scaled = kernel.bytes == 1;
  auto gate_up = read<char>(layers * kernel.X * kernel.D * 2 * kernel.F * kernel.bytes);
  auto down = read<char>(layers * kernel.X * kernel.F * kernel.D * kernel.bytes);
  auto gate_up_scale = read<float>(scaled ? layers * kernel.X * blocks(kernel.D) * 2 * blocks(kernel.F) : 0);
  auto down_scale = read<float>(scaled ? layers * kernel.X * blocks(kernel.F) * blocks(kernel.D) : 0);
  auto rows = read<float>(kernel.N * stride);
  auto ids = read<int32_t>(kernel.N * kernel.K);
  auto weights = read<float>(kernel.N * kernel.K);
  kernel.gate_up = gate_up.data(), kernel.down = down.data();
  kernel.gate_up_scale = gate_up_scale.data(), kernel.down_scale = down_scale.data();
  kernel.rows = rows.data(), kernel.ids = ids.data(), kernel.weights = weights.data();
  std::vector<float> out(kernel.N * kernel.D);
  run(kernel, out);
}

template <class Kernel>
void attention(const std::vector<int64_t>& s, float scale, int threads) {
  Kernel kernel{};
  kernel.R = s[0], kernel.C = s[1], kernel.H = s[2], kernel.N = s[3], kernel.O = s[4], kernel.U = s[5], kernel.M = s[6];
  kernel.Pr = s[7];
  const long layers = s[8], pages = s[9], G = s[10], bytes = s[11], absorbs = s[12], holes = s[13];
  kernel.scale = scale, kernel.threads = threads;
  const long queries = kernel.R * kernel.C * kernel.H;
  auto q_nope = read<float>(queries * (absorbs ? kernel.N : kernel.M));
  auto q_rope = read<float>(queries * kernel.O);
  auto weights = read<float>(absorbs ? kernel.M * kernel.H * (kernel.N + kernel.U) : 0);
  auto latent = read<char>(layers * pages * G * kernel.M * bytes);
  auto scale_of_latents = read<float>(bytes == 1 ? layers * pages * G * ((kernel.M + kScaled - 1) / kScaled) : 0);
  auto rope = read<char>(layers * pages * G * kernel.O * std::max<long>(bytes, 2));
  auto start = read<int32_t>(kernel.R), length = read<int32_t>(kernel.R), tables = read<int32_t>(kernel.R * kernel.Pr);
  auto filled = read<uint8_t>(holes ? pages * G : 0);
  kernel.q_nope = q_nope.data(), kernel.q_rope = q_rope.data(), kernel.weights = absorbs ? weights.data() : nullptr;
  kernel.cache = {latent.data(), rope.data(), kernel.M, kernel.O, static_cast<int>(bytes), layers - 1, pages, G, scale_of_latents.data()};
  kernel.start = start.data(), kernel.length = length.data(), kernel.tables = tables.data();
  kernel.filled = holes ? filled.data() : nullptr;
  std::vector<float> out(queries * (absorbs ? kernel.U : kernel.M));
  run(kernel, out);
}

}  // namespace

int main() {
  auto head = read<int64_t>(3);
  auto sizes = read<int64_t>(head[2]);
  const float scale = read<float>(1)[0];
  const int threads = static_cast<int>(head[1]);
  if (head[0] == 0) experts(sizes, threads);
  if (head[0] == 1) attention<AbsorbedAttention>(sizes, scale, threads);
  if (head[0] == 2) attention<ExpandedAttention>(sizes, scale, threads);
  return 0;
}
