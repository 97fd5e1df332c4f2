"""Cases for the native kernels, and what they should give, by loops in float64."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

STORED = {4: np.dtype(np.float32), 2: np.dtype(ml_dtypes.bfloat16), 1: np.dtype(ml_dtypes.float8_e4m3fn)}


@dataclass(frozen=True)
class ExpertsCase:
    """Weights of all layers as they are stored, of which the last layer is used; rows, ids, routing weights."""

    gate_up: np.ndarray
    down: np.ndarray
    scales: tuple[np.ndarray, np.ndarray] | None
    rows: np.ndarray
    ids: np.ndarray
    weights: np.ndarray

    @classmethod
    def drawn(cls, seed, *, X, D, F, N, K, stored=4, layers=2, routing="some"):
        rng = np.random.default_rng(seed)
        blocks = lambda size: -(-size // 128)  # noqa: E731
        draw = lambda *shape: rng.normal(size=shape).astype(STORED[stored])  # noqa: E731
        scales = None
        if stored == 1:
            shapes = (layers, X, blocks(D), 2, blocks(F)), (layers, X, blocks(F), blocks(D))
            scales = tuple(rng.uniform(0.5, 2, size=shape).astype(np.float32) for shape in shapes)
        ids = np.stack([rng.permutation(max(X, K))[:K] for _ in range(N)]).astype(np.int32)
        ids[ids >= X] = -1
        if routing == "some":
            ids[rng.random(ids.shape) < 0.5] = -1
        elif routing == "one expert":
            ids[:], ids[:, 0] = -1, X - 1
        elif routing == "none":
            ids[:] = -1
        rows = rng.normal(size=(N, D)).astype(np.float32) / D**0.5
        return cls(
            draw(layers, X, D, 2, F), draw(layers, X, F, D), scales, rows, ids, rng.random((N, K), dtype=np.float32)
        )

    def params(self):
        """As ``ExpertProduct`` takes them on CPU: bits of what is narrower than float32, and the layer's number."""
        bits = {2: np.uint16, 1: np.uint8}
        as_stored = lambda a: a.view(bits[a.itemsize]) if a.itemsize in bits else a  # noqa: E731
        found = {"gate_up.weight": as_stored(self.gate_up), "down.weight": as_stored(self.down)}
        if self.scales:
            found |= {"gate_up.scale": self.scales[0], "down.scale": self.scales[1]}
        return found | {"layer": np.int32(len(self.down) - 1)}

    def expected(self):
        """Float64, one row and one expert at a time; and the sum of what was added up, to which rounding is relative."""
        gate_up, down = self.gate_up[-1].astype(np.float64), self.down[-1].astype(np.float64)
        if self.scales:
            gate_up = gate_up * self._spread(self.scales[0][-1], gate_up.shape, (1, 3))
            down = down * self._spread(self.scales[1][-1], down.shape, (1, 2))
        out, size = np.zeros(self.rows.shape), np.zeros(self.rows.shape)
        for n, k in np.argwhere(self.ids >= 0):
            x = self.ids[n, k]
            gate, up = np.einsum("d,dgf->gf", self.rows[n].astype(np.float64), gate_up[x])
            hidden = self.weights[n, k] * gate / (1 + np.exp(-gate)) * up
            out[n] += hidden @ down[x]
            size[n] += np.abs(hidden) @ np.abs(down[x])
        return out, size

    @staticmethod
    def _spread(scale, shape, axes):
        for axis in axes:
            scale = np.repeat(scale, 128, axis=axis).take(np.arange(shape[axis]), axis=axis)
        return scale


@dataclass(frozen=True)
class AttentionCase:
    """Queries, W^UK and W^UV (None: in latent space), the cache of all layers, of which the last is read, and its rows."""

    q_nope: np.ndarray
    q_rope: np.ndarray
    weights: np.ndarray | None
    latent: np.ndarray
    rope: np.ndarray
    start: np.ndarray
    length: np.ndarray
    tables: np.ndarray
    value_width: int
    filled: np.ndarray | None = None
    scales: np.ndarray | None = None
    scale: float = 0.25

    @classmethod
    def drawn(cls, seed, *, R, C, H, N, O, U, M, G, longest, stored=4, absorbs=True, holes=False, layers=2):
        rng = np.random.default_rng(seed)
        draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
        length = rng.integers(0, C + 1, size=R).astype(np.int32)
        start = rng.integers(0, max(longest - C, 0) + 1, size=R).astype(np.int32)
        Pr = -(-max(longest, C) // G)
        pages = R * Pr + 1
        tables = 1 + rng.permutation(R * Pr).reshape(R, Pr).astype(np.int32)
        return cls(
            draw(R, C, H, N if absorbs else M),
            draw(R, C, H, O),
            draw(M, H, N + U) / M**0.5 if absorbs else None,
            draw(layers, pages, G, M).astype(STORED[stored]),
            draw(layers, pages, G, O).astype(STORED[max(stored, 2)]),
            start,
            length,
            tables,
            U,
            (rng.random((pages, G)) < 0.6).astype(np.uint8) if holes else None,
            rng.uniform(0.5, 2, size=(layers, pages, G, -(-M // 128))).astype(np.float32) if stored == 1 else None,
        )

    def cache(self):
        """As the kernels take it: bits of what is narrower than float32."""
        bits = {2: np.uint16, 1: np.uint8}
        as_stored = lambda a: a.view(bits[a.itemsize]) if a.itemsize in bits else a  # noqa: E731
        found = {"latent": as_stored(self.latent), "rope": as_stored(self.rope)}
        return found if self.scales is None else found | {"scale": self.scales}

    def expected(self):
        """Float64, one row and query at a time; zero for padding."""
        R, C, H, _ = self.q_rope.shape
        G, M = self.latent.shape[2:]
        latents = self.latent[-1].astype(np.float64)
        if self.scales is not None:
            latents = latents * np.repeat(self.scales[-1], 128, axis=-1)[..., :M]
        out = np.zeros((R, C, H, M if self.weights is None else self.value_width))
        for r in range(R):
            latent, rope = (
                a[self.tables[r]].reshape(-1, a.shape[-1]).astype(np.float64) for a in (latents, self.rope[-1])
            )
            for c in range(self.length[r]):
                seen = min(self.start[r] + c + 1, self.tables.shape[1] * G)
                q = self.q_nope[r, c].astype(np.float64)
                if self.weights is not None:
                    q = np.einsum("hn,mhn->hm", q, self.weights[..., : q.shape[-1]])
                scores = (q @ latent[:seen].T + self.q_rope[r, c] @ rope[:seen].T) * self.scale
                if self.filled is not None:
                    visible = self.filled[self.tables[r]].reshape(-1)[:seen].astype(bool)
                    visible[-1] = True
                    scores = np.where(visible, scores, -np.inf)
                probs = np.exp(scores - scores.max(axis=1, keepdims=True))
                heads = probs / probs.sum(axis=1, keepdims=True) @ latent[:seen]
                if self.weights is not None:
                    heads = np.einsum("hm,mhu->hu", heads, self.weights[..., -self.value_width :])
                out[r, c] = heads
        return out
