// Attention, and the products with rows anywhere in memory that it alone has.
#include "attention.h"
#include "compressed.h"

namespace dsjax {

DSJAX_PRODUCT(, Scattered)
template void run_kernel(const AbsorbedAttention&, char*, const Schedule&);
template void run_kernel(const ExpandedAttention&, char*, const Schedule&);
template void run_kernel(const CompressedAttention&, char*, const Schedule&);

}  // namespace dsjax
