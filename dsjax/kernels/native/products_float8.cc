// Products with matrices in FP8.
#include "products.h"

namespace dsjax {

DSJAX_PANEL_AND_STREAM_PRODUCT(, Matrix<Float8>)

}  // namespace dsjax
