"""The wire format: a token's row, its experts and their weights in one array of unsigned words.

One array means one collective each way. Words are unsigned integers, whose bits no backend changes (the CPU backend sends bfloat16 as
float32 and FP8 as float16). A packed row is ``[payload | scales | weights | ids | extra]``: D values in the compute dtype or e4m3; float32
scales (only with FP8); K float32 weights; K physical expert ids; one int32 that the exchange may use.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt

from sharding import fp8

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


@dataclass(frozen=True)
class WireFormat:
    """Widths and dtypes of a packed row.

    width: D; top_k: K; dtype: the compute dtype; fp8: whether the payload travels as e4m3 with block scales.
    """

    width: int
    top_k: int
    dtype: jnp.dtype
    fp8: bool = False

    @property
    def word(self) -> jnp.dtype:
        """The unsigned integer dtype of a row."""
        return jnp.dtype(_WORDS[1 if self.fp8 else np.dtype(self.dtype).itemsize])

    @property
    def fields(self) -> tuple[tuple[int, jnp.dtype], ...]:
        """``(count, dtype)`` of payload, scales, weights, ids and extra, in their order in a row."""
        payload = fp8.E4M3 if self.fp8 else self.dtype
        scales = fp8.num_scales(self.width) if self.fp8 else 0
        # Expert ids fit 16 bits; 32-bit words would have to hold pairs of them, so ids are 32-bit there.
        id_dtype = jnp.int32 if self.word.itemsize == 4 else jnp.int16
        return (
            (self.width, jnp.dtype(payload)),
            (scales, jnp.dtype(jnp.float32)),
            (self.top_k, jnp.dtype(jnp.float32)),
            (self.top_k, jnp.dtype(id_dtype)),
            (1, jnp.dtype(jnp.int32)),
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of a packed row."""
        return sum(count * dtype.itemsize for count, dtype in self.fields)

    @property
    def answer_bytes(self) -> int:
        """Bytes of a weighted sum in combine."""
        return self.width * np.dtype(self.dtype).itemsize

    @property
    def row_words(self) -> int:
        """Words of a packed row."""
        return self.row_bytes // self.word.itemsize

    def pack(
        self,
        x_ND: Float[Array, "N D"],
        ids_NK: Int[Array, "N K"],
        weights_NK: Float[Array, "N K"],
        extra: Int[Array, ""],
    ) -> UInt[Array, "N W"]:
        """Pack rows, ids, weights and one number (the same in every row) into words ``[N, row_words]``."""
        payload, scales = fp8.quantise(x_ND) if self.fp8 else (x_ND, None)
        values = [payload, scales, weights_NK, ids_NK, jnp.broadcast_to(extra, (x_ND.shape[0], 1))]
        words = [
            lax.bitcast_convert_type(value.astype(dtype), self.word).reshape(len(x_ND), -1)
            for value, (count, dtype) in zip(values, self.fields, strict=True)
            if count
        ]
        return jnp.concatenate(words, axis=1)

    def unpack(
        self, words_NW: UInt[Array, "N W"]
    ) -> tuple[PackedRows, Int[Array, "N K"], Float[Array, "N K"], Int[Array, "N"]]:
        """Return ``(rows, ids, weights, extra)`` of packed rows; weights float32, ids and extra int32."""
        _, _, weights, ids, extra = self._split(words_NW)
        return PackedRows(self, words_NW), ids.astype(jnp.int32), weights, extra[:, 0]

    def payload(self, words: UInt[Array, "*n W"]) -> Float[Array, "*n D"]:
        """Return the token rows of packed rows, in the compute dtype."""
        payload, scales, *_ = self._split(words)
        return fp8.dequantise(payload, scales).astype(self.dtype) if self.fp8 else payload

    def _split(self, words: UInt[Array, "*n W"]) -> list[jax.Array | None]:
        values, at = [], 0
        for count, dtype in self.fields:
            size = count * dtype.itemsize // self.word.itemsize
            values.append(_from_words(words[..., at : at + size], dtype) if count else None)
            at += size
        return values

    def empty_row(self, extra: Int[Array, ""]) -> UInt[Array, "1 W"]:
        """Return a packed row that uses no expert: zeros with ids -1."""
        shape = (1, self.top_k)
        return self.pack(jnp.zeros((1, self.width), self.dtype), jnp.full(shape, -1), jnp.zeros(shape), extra)


@dataclass(frozen=True)
class PackedRows:
    """Packed token rows ``[N, D]``. ``take`` reads rows as from an array, and unpacks only these.

    A rank's experts use an eighth to a half of the rows that arrive in decode; unpacking all of them would waste a pass over memory.
    """

    wire: WireFormat
    words_NW: UInt[Array, "N W"]

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, D)``."""
        return self.words_NW.shape[0], self.wire.width

    @property
    def dtype(self) -> jnp.dtype:
        """The compute dtype."""
        return jnp.dtype(self.wire.dtype)

    def take(self, indices: Int[Array, "*n"], axis: int = 0, mode: str = "clip") -> Float[Array, "*n D"]:
        """Return rows by index, like ``jax.Array.take`` along axis 0."""
        if axis != 0:
            raise ValueError(f"packed rows are taken along axis 0, not {axis}")
        return self.wire.payload(self.words_NW.take(indices, axis=0, mode=mode))

    def take_quantised(self, indices: Int[Array, "*n"]) -> fp8.Quantised:
        """Return rows of an FP8 wire by index (clipped), still quantised, so that FP8 GEMMs do not round them a second time."""
        values, scales, *_ = self.wire._split(self.words_NW.take(indices, axis=0, mode="clip"))
        return fp8.Quantised(values, scales)


def _from_words(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    ratio = dtype.itemsize // words.dtype.itemsize
    if ratio > 1:
        words = words.reshape(*words.shape[:-1], -1, ratio)
    return lax.bitcast_convert_type(words, dtype)
