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
  Exchange::arrive(run, group, ranks, block, gathers, std::move(part), patience, schedule);
}

void arrive_together(int64_t run, int64_t group, long ranks, Guest guest, int64_t patience, int threads, const Schedule& schedule) {
  Together::arrive(run, group, ranks, std::move(guest), patience, threads, schedule);
}

long desks_of_experts() { return Together::desks(); }

}  // namespace dsjax
