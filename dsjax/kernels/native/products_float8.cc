// Products with matrices in FP8.
#include "products.h"

namespace dsjax {

DSJAX_PANEL_PRODUCT(, Matrix<Float8>)
DSJAX_STREAM_PRODUCT(, Matrix<Float8>)

}  // namespace dsjax
