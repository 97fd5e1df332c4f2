// The kernels that take a compiler little time: experts, dense products, norms, the index choice, the router, hyper-connections. And what devices of one
// process do together.
#include "dense.h"
#include "exchange.h"
#include "experts.h"
#include "index.h"
#include "router.h"
#include "streams.h"
#include "together.h"

namespace dsjax {

template void run_kernel(const Experts&, char*, const Schedule&);
template void run_kernel(const Dense&, char*, const Schedule&);
template void run_kernel(const Norm&, char*, const Schedule&);
template void run_kernel(const IndexChoice&, char*, const Schedule&);
template void run_kernel(const Router&, char*, const Schedule&);
template void run_kernel(const Streams&, char*, const Schedule&);
template void run_kernel(const StreamsAfter&, char*, const Schedule&);

void arrive_at_exchange(int64_t run, int64_t group, long ranks, size_t block, bool gathers, Part part, int64_t patience, const Schedule& schedule) {
  const auto make = [&] { return std::make_shared<Exchange>(ranks, block, gathers); };
  const auto [exchange, place] = Meetings<Exchange>::here().enter({run, group, block, gathers}, make, std::move(part), patience);
  if (exchange->copy(place)) Meetings<Exchange>::proceed(exchange, ranks, schedule);
}

void arrive_together(int64_t run, int64_t group, long ranks, Guest guest, int64_t patience, int threads, const Schedule& schedule) {
  const size_t tokens = guest.experts.N;
  const auto make = [&] { return std::make_shared<Together>(ranks); };
  const auto [together, place] = Meetings<Together>::here().enter({run, group, tokens, false}, make, std::move(guest), patience);
  if (place + 1 < ranks) return;
  together->run(threads, schedule);
  Meetings<Together>::proceed(together, ranks, schedule);
}

}  // namespace dsjax

// Number of threads for which this process keeps working memory for the experts of several devices.
extern "C" int64_t dsjax_experts_together_desks() { return dsjax::Together::desks(); }
