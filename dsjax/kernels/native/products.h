// The products of each format as functions that are compiled once, each format in a unit of its own (products_*.cc): a compiler
// takes units side by side, and has less to do than with all of them in one.
#pragma once

#include "stream.h"

namespace dsjax {

// `Panels::product` and `Stream::product`, with working memory for so many rows.
template <class B>
void panel_product(float* memory, long most_rows, long rows, const float* const* a, const B& b, long from, long to, long depth,
                   float* const* c, long c_shift, long piece) {
  Panels(memory, most_rows).product(rows, a, b, from, to, depth, c, c_shift, piece);
}
template <class B>
void stream_product(float* memory, long most_rows, long rows, const float* const* a, const B& b, long from, long to, long depth,
                    float* const* c, long c_shift, long piece) {
  Stream(memory, most_rows).product(rows, a, b, from, to, depth, c, c_shift, piece);
}

// `product` of whole sums and rows that lie in sequence. A function of its own, so that its tiles are compiled for these two alone.
template <class B>
void place_product(long rows, const float* const* a, const B& b, long from, long to, long depth, float* const* c, long c_shift, long piece) {
  product(rows, a, 1, b, from, to, depth, c, Sums::replace, c_shift, piece);
}

// Instantiations of the products for one B, or for a format with its transposed matrices. how: `extern` where they are used, empty in their unit.
#define DSJAX_PRODUCT(how, B) \
  how template void product(long, const float* const*, long, const B&, long, long, long, float* const*, Sums, long, long);
#define DSJAX_PANEL_PRODUCT(how, B) \
  how template void panel_product(float*, long, long, const float* const*, const B&, long, long, long, float* const*, long, long);
#define DSJAX_PANEL_AND_STREAM_PRODUCT(how, B) \
  DSJAX_PANEL_PRODUCT(how, B) \
  how template void stream_product(float*, long, long, const float* const*, const B&, long, long, long, float* const*, long, long);
#define DSJAX_FORMAT_PRODUCTS(how, Format) \
  how template void place_product(long, const float* const*, const Matrix<Format>&, long, long, long, float* const*, long, long); \
  DSJAX_PANEL_PRODUCT(how, Transposed<Format>) \
  DSJAX_PANEL_AND_STREAM_PRODUCT(how, Matrix<Format>)

DSJAX_PRODUCT(extern, Scattered)
DSJAX_PRODUCT(extern, Matrix<Float32>)
DSJAX_FORMAT_PRODUCTS(extern, Float32)
DSJAX_FORMAT_PRODUCTS(extern, BFloat16)
DSJAX_PANEL_AND_STREAM_PRODUCT(extern, Matrix<Float8>)

}  // namespace dsjax
