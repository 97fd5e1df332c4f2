// Products with matrices in bfloat16.
#include "products.h"

namespace dsjax {

DSJAX_PLACE_PRODUCT(, Matrix<BFloat16>)
DSJAX_PANEL_PRODUCT(, Matrix<BFloat16>)
DSJAX_PANEL_PRODUCT(, Transposed<BFloat16>)
DSJAX_STREAM_PRODUCT(, Matrix<BFloat16>)

}  // namespace dsjax
