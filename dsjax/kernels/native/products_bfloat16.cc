// Products with matrices in bfloat16.
#include "products.h"

namespace dsjax {

DSJAX_FORMAT_PRODUCTS(, BFloat16)

}  // namespace dsjax
