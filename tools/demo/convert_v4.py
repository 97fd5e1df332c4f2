"""Make a DeepSeek-V4 of the demo model: its weights where the two agree, then training on the same text.

    nice python -m tools.demo.convert_v4 RUN_FOLDER                       # the recipe behind the bundled weights
    python -m tools.demo.export RUN_FOLDER --folder configs/models/demo-v4
    python -m tools.demo.evaluate --run RUN_FOLDER --folder configs/models/demo-v4

Layer i is made from MoE layer i of the demo. The dense layer before these becomes what it adds to each token's embedding on average, and
the first layer's hash table the experts that each token went to most often. MLA becomes attention with one key-value head by absorbing the
key projection into the queries: the latent, projected to as many values as an entry has, and the rotary key are the entry. The four streams
begin alike. Up to `choosing_from` queries attend to all entries; indexers learn from the first step on.
"""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int

from dsjax.config import ModelConfig, load_config
from dsjax.config.layers import stacks
from dsjax.model.parameter_table import parameter_table
from dsjax.model.parameters import ParameterTable
from dsjax.model.transformer import MLA, DecoderLayer, Pass, Transformer, XlaProducts, rotation_at
from tools.demo import optimizer
from tools.demo.checkpoint import read_model
from tools.demo.experts import experts_within
from tools.demo.step import attention_divergence, initial_parameters, seeing_all, train_step
from tools.demo.train import FOLDER, command, read_batches, run_steps

V4_FOLDER = FOLDER.parent / "demo-v4"
SAVE_EVERY = 25
SEEN_TOKENS, SEEN_LENGTH = 32_768, 512
"""Text that the demo reads, in rows of this length, for the averages that its weights are converted with."""


@dataclass(frozen=True)
class Schedule:
    """What changes with the step."""

    steps: int = 580
    choosing_from: int = 300
    """Step from which indexers choose, and rows have 1,024 tokens; before it 512."""
    long_from: int = 525
    """Step from which rows have 2,048 tokens."""
    batch_tokens: int = 4096
    peak_rate: float = 0.003
    warmup_steps: int = 30
    mtp_weight: float = 0.2
    capacity_factor: float = 1.3
    first_token: int = 3080 * 4096
    """Tokens of the demo's training: batches go on where it ended."""

    def row_length(self, step: int) -> int:
        """Tokens a row."""
        return 2048 if step >= self.long_from else 1024 if step >= self.choosing_from else 512

    def remaining(self, step: int) -> float:
        """What the linear decay has left: 1 at the beginning, 0 at the end."""
        return 1 - step / self.steps

    def rate(self, step: int) -> float:
        """Learning rate."""
        return self.peak_rate * min(1.0, (step + 1) / self.warmup_steps) * self.remaining(step)


def of_attention(mla: MLA, h: Float[Array, "B S D"], rotation, width: int, scale: float) -> dict[str, Array]:
    """Parameters of attention with one key-value head that does what ``mla`` does to inputs like ``h``.

    width, scale: of an entry, and of attention scores. Latents are projected so that keys and values change least, to values of mean square
    1, and rotary keys are scaled to the same. The mean length of queries goes into the scale of entries, since queries are normed.
    """
    p, own = mla.project(h, rotation), mla.config.mla
    N, O, M = own.qk_nope_head_dim, own.qk_rope_head_dim, own.kv_lora_rank
    down, up = mla.kv_a.value(h.dtype), jnp.concatenate(mla.key_value_weight(h.dtype), axis=-1)
    root = jnp.linalg.cholesky(
        jnp.einsum("bsm,bsn->mn", p.latent, p.latent) / p.latent[..., 0].size + 1e-6 * jnp.eye(M)
    )
    basis, sizes, rest = jnp.linalg.svd(root.T @ up.reshape(M, -1), full_matrices=False)
    encode = jnp.linalg.solve(root.T, basis[:, : width - O])
    decode = (sizes[:, None] * rest)[: width - O].reshape(width - O, *up.shape[1:])
    length, rotary = (jnp.sqrt(jnp.mean(part**2)) for part in jnp.split(h @ down, [M], axis=-1))
    entry = jnp.concatenate([down[:, :M] * mla.kv_a_norm.scale @ encode, down[:, M:] * (length / rotary)], axis=1)
    nope, rope = jnp.split(mla.query_weight(h.dtype), [N], axis=-1)
    query = jnp.concatenate([jnp.einsum("qhn,mhn->qhm", nope, decode[..., :N]), rope * rotary], axis=-1)
    sharpness = (
        jnp.sqrt(jnp.mean(jnp.einsum("bsq,qhw->bshw", p.q_latent, query) ** 2)) * mla.config.softmax_scale / scale
    )
    return {
        "q_b.weight": rearrange(query, "q h w -> q (h w)"),
        "kv.weight": entry,
        "kv_norm.scale": jnp.full(width, sharpness),
        "o_a.weight": rearrange(jnp.pad(decode[..., N:] / sharpness, ((0, O), (0, 0), (0, 0))), "w h u -> w (h u)"),
        "o_b.weight": mla.o.value(h.dtype),
    }


def hash_table(counts: Float[np.ndarray, "V E"], chosen: int, slack: float = 1.15) -> Int[np.ndarray, "V K"]:
    """The experts that tokens went to most often, up to ``slack`` times the mean load of an expert; frequent tokens come first."""
    tokens, load = counts.sum(axis=1) / chosen, np.zeros(counts.shape[1])
    table, most = np.zeros((len(counts), chosen), np.int32), slack * counts.sum() / counts.shape[1]
    for token in np.argsort(-tokens, kind="stable"):
        table[token] = np.lexsort((load, -counts[token], load + tokens[token] > most))[:chosen]
        load[table[token]] += tokens[token]
    return table


def begin(config: ModelConfig, table: ParameterTable, rows: Int[Array, "B S+2"], seed: int) -> dict[str, Array]:
    """The first step's parameters in float32. rows: text that the demo reads, to average over."""
    dense, dense_table, trained = read_model(FOLDER)
    model: Transformer = dense_table.bind(trained)
    params, inputs = initial_parameters(table, seed), rows[:, :-2]
    params |= {path: trained[path] for path in params if path in trained}
    products, positions = XlaProducts(experts_within(2.0)), jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
    given = Pass(inputs, rotation_at(dense, positions), products)

    def of_tokens(values: Float[Array, "B S N"]) -> Float[Array, "V N"]:
        """The sum of what stands at each token id."""
        return jax.ops.segment_sum(values.reshape(-1, values.shape[-1]), inputs.reshape(-1), config.vocab_size)

    def convert(stack: str, source: str, number: int, layer: DecoderLayer, x: Float[Array, "B S D"]) -> None:
        """Set the parameters of a stack of one layer from layer ``number`` of the demo's stack ``source``, which is given ``x``."""
        for path in (path for path in params if path.startswith(f"{stack}.")):
            old = path.replace(stack, source)
            if old in trained:
                params[path] = trained[old][number : number + 1]
        params[f"{stack}.moe.router.weight"] *= 1.5  # from the scale of a sigmoid to that of √softplus
        found = of_attention(layer.attn, layer.attn_norm(x), given.rotation, config.v4.head_dim, config.softmax_scale)
        if f"{stack}.attn.compressor.kv.weight" in params:
            series = params[f"{stack}.attn.compressor.bias"].shape[-1] // config.v4.head_dim
            found["compressor.kv.weight"] = jnp.tile(found["kv.weight"], series)
            found["compressor.gate.weight"] = 0.3 * params[f"{stack}.attn.compressor.gate.weight"][0]
            found["compressor.norm.scale"] = found["kv_norm.scale"]
        params.update({f"{stack}.attn.{name}": value[None] for name, value in found.items()})

    x = model.embed(inputs, jnp.float32)
    added = layer_of(model.dense_layers, 0)(x, given)[0] - x
    few = 4  # so often each token is counted as having the mean
    mean = (of_tokens(added) + few * added.mean(axis=(0, 1))) / (of_tokens(jnp.ones_like(added)) + few)
    params["embed.weight"] += mean
    x = x + added
    kinds = {number: kind for kind, numbers in stacks(config.layer_runs).items() for number in numbers}
    for number, kind in sorted(kinds.items()):
        layer = layer_of(model.moe_layers, number)
        convert(kind.stack, "moe_layers", number, layer, x)
        x, (routing, _) = layer(x, given)
        if kind.mlp == "hash":
            counts = of_tokens(jax.nn.one_hot(routing.ids, config.n_routed_experts).sum(axis=-2))
            chosen = hash_table(np.asarray(counts), config.num_experts_per_tok)
            params[f"{kind.stack}.moe.router.experts_of_token"] = jnp.asarray(chosen[None])
    module, final = layer_of(model.mtp, 0), trained["final_norm.scale"]
    embedded = model.embed(rows[:, 1:-1], jnp.float32)
    joined = module.join(model.final_norm(x), embedded, products.multiply, products.normalise)
    convert("mtp.layers", "mtp.layers", 0, module.layers, joined)
    halves = jnp.split(trained["mtp.eh_proj.weight"], 2, axis=1)
    params["mtp.embed_proj.weight"], params["mtp.hidden_proj.weight"] = halves
    params["mtp.hidden_norm.scale"] *= final / jnp.sqrt(jnp.mean(final**2))
    n = config.v4.hc_mult
    mean, apart = jnp.full(n, -jnp.log(n - 1.0)), 3 * jnp.eye(n).reshape(-1)  # read the mean, and hardly mix
    for index, path in enumerate(params):
        if path.endswith("residual.weight"):
            params[path] *= 0.05
        elif path.endswith("residual.base") and params[path].shape[-1] == n:
            params[path] += mean
        elif path.endswith("residual.base"):  # the noise lets streams come to differ
            noise = jax.random.normal(jax.random.fold_in(jax.random.key(seed), index), params[path].shape)
            params[path] += jnp.concatenate([mean, jnp.zeros(n), apart]) + 0.3 * noise
    return params


def layer_of(stack: nnx.Module, number: int) -> nnx.Module:
    """One layer of a stack."""
    graph, weights = nnx.split(stack)
    return nnx.merge(graph, jax.tree.map(lambda array: array[number], weights))


def convert(run: Path, schedule: Schedule, seed: int) -> None:
    """Convert the demo, and train it."""
    config = load_config(V4_FOLDER)
    batches = read_batches(run, schedule, config.bos_token_id)
    choosing, dense = (
        {"config": one, "table": parameter_table(one, weights="f32")} for one in (config, seeing_all(config))
    )

    def start() -> tuple[dict[str, Array], optimizer.State]:
        rows = [batches(first, SEEN_LENGTH) for first in range(0, SEEN_TOKENS, schedule.batch_tokens)]
        params = begin(config, choosing["table"], jnp.asarray(np.concatenate(rows)), seed)
        return params, optimizer.init_state(params)

    def advance(params: dict[str, Array], state: optimizer.State, step: int):
        return train_step(
            params,
            state,
            jnp.asarray(batches(schedule.first_token + step * schedule.batch_tokens, schedule.row_length(step))),
            jnp.int32(step),
            jnp.float32(schedule.rate(step)),
            jnp.float32(schedule.mtp_weight),
            jnp.float32(0.005 * max(0.1, schedule.remaining(step))),
            settings=optimizer.Settings(),
            capacity_factor=schedule.capacity_factor,
            observe=attention_divergence,
            **(choosing if step >= schedule.choosing_from else dense),
        )

    run_steps(run, schedule, seed, start, advance, SAVE_EVERY)


if __name__ == "__main__":
    command(__doc__.splitlines()[0], Schedule, convert)
