// Products with packed matrices.
#include "fp4.h"

namespace dsjax {

DSJAX_PANEL_AND_STREAM_PRODUCT(, Fp4)
DSJAX_PANEL_AND_STREAM_PRODUCT(, Int4)

}  // namespace dsjax
