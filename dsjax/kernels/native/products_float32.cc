// Products with matrices in float32.
#include "products.h"

namespace dsjax {

DSJAX_PRODUCT(, Matrix<Float32>)
DSJAX_FORMAT_PRODUCTS(, Float32)

}  // namespace dsjax
