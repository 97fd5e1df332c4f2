// Products with matrices in bfloat16 and in FP8.
#include "products.h"

namespace dsjax {

DSJAX_FORMAT_PRODUCTS(, BFloat16)
DSJAX_PANEL_AND_STREAM_PRODUCT(, Matrix<Float8>)

}  // namespace dsjax
