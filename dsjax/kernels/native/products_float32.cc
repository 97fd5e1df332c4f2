// Products with matrices in float32.
#include "products.h"

namespace dsjax {

DSJAX_PRODUCT(, Matrix<Float32>)
DSJAX_PLACE_PRODUCT(, Matrix<Float32>)
DSJAX_PANEL_PRODUCT(, Transposed<Float32>)
DSJAX_PANEL_PRODUCT(, Matrix<Float32>)
DSJAX_STREAM_PRODUCT(, Matrix<Float32>)

}  // namespace dsjax
