// Products with matrices in FP4.
#include "fp4.h"

namespace dsjax {

DSJAX_PANEL_PRODUCT(, Fp4)
DSJAX_STREAM_PRODUCT(, Fp4)

}  // namespace dsjax
