// The kernels that take a compiler little time: experts, dense products, norms, the index choice.
#include "dense.h"
#include "experts.h"
#include "index.h"

namespace dsjax {

template void run_kernel(const Experts&, char*, const Schedule&);
template void run_kernel(const Dense&, char*, const Schedule&);
template void run_kernel(const Norm&, char*, const Schedule&);
template void run_kernel(const IndexChoice&, char*, const Schedule&);

}  // namespace dsjax
