// The kernels without XLA or Python: reads one case from standard input, writes its result to standard output. For sanitizers,
// which drown in other people's reports inside a JAX process. The case is in the machine's byte order:
//   int64 kernel (0 experts, 1 absorbed, 2 expanded attention, 3 a dense product, 4 index choice, 5 an exchange, 6 experts of several devices
//   together, 7 the router), int64 threads, int64 count, `count` int64 sizes, float scale,
//   then the arrays, in the order that the kernel's fields are filled below.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

// In one unit: without optimisation a compiler spends its time on the headers.
#include "attention.cc"
#include "others.cc"
#include "products_bfloat16.cc"
#include "products_float32.cc"
#include "products_float8.cc"
#include "products_fp4.cc"

namespace {

using namespace dsjax;

template <class T>
std::vector<T> read(long count) {
  std::vector<T> values(count);
  if (std::fread(values.data(), sizeof(T), count, stdin) != static_cast<size_t>(count)) std::exit(3);
  return values;
}

template <class T>
void write(const std::vector<T>& values) {
  if (!values.empty()) std::fwrite(values.data(), sizeof(T), values.size(), stdout);
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
  ~Threads() { join(); }
  // Waits until no task runs, nor any that one has asked for.
  void join() {
    for (;;) {
      std::vector<std::thread> begun;
      {
        std::lock_guard<std::mutex> lock(mutex);
        begun.swap(all);
      }
      if (begun.empty()) return;
      for (std::thread& thread : begun) thread.join();
    }
  }
};

// Working memory of exactly the size that the kernel asks for, so that a byte more is found, and full of NaN.
template <class Kernel>
void run(Kernel& kernel, std::vector<float>& out) {
  const size_t bytes = kernel.scratch_bytes();
  char* scratch = static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
  std::fill(scratch, scratch + bytes, static_cast<char>(0xff));
  {
    Threads threads;
    run_kernel(kernel, scratch, threads.schedule());
  }
  std::free(scratch);
  write(out);
}

void experts(const std::vector<int64_t>& s, int threads) {
  Experts kernel{};
  const long layers = s[0], stride = s[7];
  kernel.pieces = s[8], kernel.apart = s[9];
  kernel.X = s[1], kernel.D = s[2], kernel.F = s[3], kernel.N = s[4], kernel.K = s[5], kernel.bytes = static_cast<int>(s[6]);
  kernel.layer = layers - 1, kernel.row_stride = stride, kernel.threads = threads;
  auto blocks = [](long size) { return (size + kScaleBlock - 1) / kScaleBlock; };
  kernel.fp4_block = s[10], kernel.integers = s[11];
  const bool scaled = kernel.bytes == 1 && !kernel.fp4_block;
  const long pairs_of_values = kernel.fp4_block ? 2 : 1;
  auto gate_up = read<char>(layers * kernel.X * kernel.D * 2 * kernel.F * kernel.bytes / pairs_of_values);
  auto down = read<char>(layers * kernel.X * kernel.F * kernel.D * kernel.bytes / pairs_of_values);
  auto gate_up_scale = read<float>(scaled ? layers * kernel.X * blocks(kernel.D) * 2 * blocks(kernel.F) : 0);
  auto down_scale = read<float>(scaled ? layers * kernel.X * blocks(kernel.F) * blocks(kernel.D) : 0);
  auto small = [&](long values) {
    return read<uint8_t>(kernel.fp4_block ? layers * kernel.X * values / kernel.fp4_block * (kernel.integers ? 2 : 1) : 0);
  };
  auto gate_up_fp4 = small(kernel.D * 2 * kernel.F), down_fp4 = small(kernel.F * kernel.D);
  auto gate_up_whole = read<float>(kernel.fp4_block == 16 ? layers * kernel.X * 2 : 0);
  auto down_whole = read<float>(kernel.fp4_block == 16 ? layers * kernel.X : 0);
  auto rows = read<float>(kernel.N * stride);
  auto ids = read<int32_t>(kernel.N * kernel.K);
  auto weights = read<float>(kernel.N * kernel.K);
  kernel.gate_up = gate_up.data(), kernel.down = down.data();
  kernel.gate_up_scale = gate_up_scale.data(), kernel.down_scale = down_scale.data();
  if (kernel.fp4_block) kernel.gate_up_scale = gate_up_fp4.data(), kernel.down_scale = down_fp4.data();
  if (kernel.fp4_block == 16) kernel.gate_up_whole = gate_up_whole.data(), kernel.down_whole = down_whole.data();
  kernel.rows = rows.data(), kernel.ids = ids.data(), kernel.weights = weights.data();
  std::vector<float> out(kernel.N * (kernel.apart ? kernel.K : 1) * kernel.D);
  kernel.out = out.data();
  run(kernel, out);
}

void dense(const std::vector<int64_t>& s, int threads) {
  Dense kernel{};
  const long layers = s[0];
  kernel.K = s[1], kernel.parts = s[2], kernel.width = s[3], kernel.N = s[4], kernel.bytes = static_cast<int>(s[5]), kernel.pieces = s[6];
  kernel.transposed = s[7], kernel.layer = layers - 1, kernel.threads = threads;
  auto blocks = [](long size) { return (size + kScaleBlock - 1) / kScaleBlock; };
  auto weight = read<char>(layers * kernel.K * kernel.parts * kernel.width * kernel.bytes);
  auto scale = read<float>(kernel.bytes == 1 ? layers * blocks(kernel.K) * kernel.parts * blocks(kernel.width) : 0);
  auto rows = read<float>(kernel.N * kernel.K);
  kernel.weight = weight.data(), kernel.scale = scale.data(), kernel.x = rows.data();
  std::vector<float> out(kernel.N * kernel.parts * kernel.width);
  kernel.out = out.data();
  run(kernel, out);
}

template <class Kernel>
void attention(const std::vector<int64_t>& s, float scale, int threads) {
  Kernel kernel{};
  kernel.R = s[0], kernel.C = s[1], kernel.H = s[2], kernel.N = s[3], kernel.O = s[4], kernel.U = s[5], kernel.M = s[6];
  kernel.Pr = s[7];
  const long layers = s[8], pages = s[9], G = s[10], bytes = s[11], holes = s[12];
  kernel.scale = scale, kernel.threads = threads;
  const long queries = kernel.R * kernel.C * kernel.H;
  auto q_nope = read<float>(queries * kernel.N);
  auto q_rope = read<float>(queries * kernel.O);
  auto weights = read<float>(kernel.M * kernel.H * (kernel.N + kernel.U));
  auto latent = read<char>(layers * pages * G * kernel.M * bytes);
  auto scale_of_latents = read<float>(bytes == 1 ? layers * pages * G * ((kernel.M + kScaled - 1) / kScaled) : 0);
  auto rope = read<char>(layers * pages * G * kernel.O * std::max<long>(bytes, 2));
  auto start = read<int32_t>(kernel.R), length = read<int32_t>(kernel.R), tables = read<int32_t>(kernel.R * kernel.Pr);
  auto filled = read<uint8_t>(holes ? pages * G : 0);
  kernel.q_nope = q_nope.data(), kernel.q_rope = q_rope.data();
  kernel.weights = {weights.data(), 4, 0, kernel.M, kernel.H * (kernel.N + kernel.U)};
  kernel.cache = {latent.data(), rope.data(), static_cast<int>(bytes), layers - 1, pages, G, scale_of_latents.data()};
  kernel.start = start.data(), kernel.length = length.data(), kernel.tables = tables.data();
  kernel.filled = holes ? filled.data() : nullptr;
  std::vector<float> out(queries * kernel.U);
  kernel.out = out.data();
  run(kernel, out);
}

// Positions [R, C, k], their numbers [R, C] and the words, all of four bytes.
void index_choice(const std::vector<int64_t>& s, int threads) {
  IndexChoice kernel{};
  kernel.R = s[0], kernel.C = s[1], kernel.I = s[2], kernel.A = s[3], kernel.k = s[4], kernel.Pr = s[5];
  const long layers = s[6], holes = s[10], slots = layers * s[7] * s[8];
  kernel.layer = layers - 1, kernel.pages = s[7], kernel.G = s[8], kernel.bytes = static_cast<int>(s[9]), kernel.threads = threads;
  const long queries = kernel.R * kernel.C;
  auto query = read<float>(queries * kernel.I * kernel.A), weight = read<float>(queries * kernel.I);
  auto keys = read<char>(slots * kernel.A * kernel.bytes);
  const long scales = (kernel.A + IndexChoice::kIndexScaled - 1) / IndexChoice::kIndexScaled;
  auto key_scale = read<float>(kernel.bytes == 1 ? slots * scales : 0);
  auto positions = read<int32_t>(queries), tables = read<int32_t>(kernel.R * kernel.Pr);
  auto filled = read<uint8_t>(holes ? kernel.pages * kernel.G : 0);
  kernel.query = query.data(), kernel.weight = weight.data(), kernel.keys = keys.data(), kernel.key_scale = key_scale.data();
  kernel.positions = positions.data(), kernel.tables = tables.data(), kernel.filled = holes ? filled.data() : nullptr;
  std::vector<float> out(queries * (kernel.k + 1 + (kernel.Pr * kernel.G + 31) / 32));
  kernel.chosen = reinterpret_cast<int32_t*>(out.data());
  kernel.count = kernel.chosen + queries * kernel.k;
  kernel.words = reinterpret_cast<uint32_t*>(kernel.count + queries);
  run(kernel, out);
}

// Scores [N, E] and a bias [E] -> ids [N, K] and weights [N, K], all of four bytes.
void router(const std::vector<int64_t>& s, float factor, int threads) {
  Router kernel{};
  kernel.N = s[0], kernel.E = s[1], kernel.K = s[2], kernel.groups = s[3], kernel.kept = s[4], kernel.best = s[5], kernel.normalised = s[6];
  auto scores = read<float>(kernel.N * kernel.E), bias = read<float>(kernel.E);
  std::vector<float> out(2 * kernel.N * kernel.K);
  kernel.scores = scores.data(), kernel.bias = bias.data(), kernel.factor = factor, kernel.threads = threads;
  kernel.ids = reinterpret_cast<int32_t*>(out.data()), kernel.weights = out.data() + kernel.N * kernel.K;
  run(kernel, out);
}

constexpr int64_t kPatience = 600;  // seconds, longer than any case takes

// Programs that run at the same time, each on devices of its own, which meet several times, one time after the other. Before each time a
// device makes its inputs anew, where those of the time before were.
template <class Arrive>
void meet(long programs, long devices, long times, Arrive arrive) {
  Threads threads;
  const Schedule schedule = threads.schedule();
  struct Device {
    long program, rank, left;
  };
  std::vector<Device> all;
  for (long device = 0; device < programs * devices; device++) all.push_back({device / devices, device % devices, times});
  std::function<void(Device&)> go_on = [&](Device& device) {
    if (device.left-- == 0) return;
    arrive(device.program, device.rank, schedule, [&](Outcome outcome) {
      if (outcome != Outcome::met) std::fputs(outcome == Outcome::no_memory ? "no memory\n" : "failed\n", stderr), std::exit(4);
      go_on(device);
    });
  };
  for (Device& device : all) schedule([&] { go_on(device); });
  threads.join();
}

// rows [programs, ranks, blocks, W], a block for each rank or one for all -> [programs, ranks, ranks, W].
void exchange(const std::vector<int64_t>& s) {
  const long programs = s[0], ranks = s[1], width = s[2], gathers = s[3], times = s[4], own = (gathers ? 1 : ranks) * width;
  auto given = read<float>(programs * ranks * own);
  std::vector<float> rows(given.size()), out(programs * ranks * ranks * width);
  meet(programs, ranks, times, [&](long program, long rank, const Schedule& schedule, std::function<void(Outcome)> proceed) {
    const long device = program * ranks + rank;
    float *from = rows.data() + device * own, *to = out.data() + device * ranks * width;
    std::copy(given.data() + device * own, given.data() + (device + 1) * own, from);
    std::fill(to, to + ranks * width, 0.0f);
    const Part part{rank, reinterpret_cast<char*>(from), reinterpret_cast<char*>(to), proceed};
    arrive_at_exchange(program, 0, ranks, sizeof(float) * width, gathers, part, kPatience, schedule);
  });
  write(out);
}

// As for `experts`, in float32, with gate and up [ranks, X, D, 2, F], down [ranks, X, F, D], rows [ranks, N, D], ids and weights
// [ranks, N, K], for each of the programs, which have the same weights -> sums [programs, ranks, N, D], counts [programs, ranks, held + 1].
void experts_together(const std::vector<int64_t>& s, int threads) {
  const long programs = s[0], ranks = s[1], X = s[2], D = s[3], F = s[4], N = s[5], K = s[6], held = s[7], times = s[8];
  auto gate_up = read<float>(ranks * X * D * 2 * F), down = read<float>(ranks * X * F * D);
  auto given = read<float>(programs * ranks * N * D);
  auto ids = read<int32_t>(programs * ranks * N * K);
  auto weights = read<float>(programs * ranks * N * K);
  std::vector<float> rows(given.size()), terms(ids.size() * D), out(given.size());
  std::vector<int32_t> counts(programs * ranks * (held + 1));
  meet(programs, ranks, times, [&](long program, long rank, const Schedule& schedule, std::function<void(Outcome)> proceed) {
    const long device = program * ranks + rank;
    auto of = [&](auto& array, long each) { return array.data() + device * each; };
    std::copy(of(given, N * D), of(given, N * D) + N * D, of(rows, N * D));
    std::fill(of(terms, N * K * D), of(terms, N * K * D) + N * K * D, std::nanf(""));
    Experts kernel{};
    kernel.gate_up = gate_up.data() + rank * X * D * 2 * F, kernel.down = down.data() + rank * X * F * D, kernel.bytes = 4;
    kernel.X = X, kernel.D = D, kernel.F = F, kernel.N = N, kernel.K = K, kernel.row_stride = D, kernel.pieces = 1, kernel.threads = threads;
    kernel.rows = of(rows, N * D), kernel.ids = of(ids, N * K), kernel.weights = of(weights, N * K);
    Guest guest{rank, held, kernel, of(terms, N * K * D), of(out, N * D), of(counts, held + 1), proceed};
    arrive_together(program, 0, ranks, guest, kPatience, static_cast<int>(ranks), schedule);
  });
  write(out);
  write(counts);
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
  if (head[0] == 3) dense(sizes, threads);
  if (head[0] == 4) index_choice(sizes, threads);
  if (head[0] == 5) exchange(sizes);
  if (head[0] == 6) experts_together(sizes, threads);
  if (head[0] == 7) router(sizes, scale, threads);
  return 0;
}
