"""DeepSeek-V4's step (`ModelStep.hidden` with `Compressed`): its layers, streams, hash routing, dispatch on meshes, its MTP pass."""

import functools

import jax
import numpy as np
import pytest
from goldens.our_model import COMPILE_QUICKLY
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from step_model import empty_groups, pack_rows, placed
from v4_models import v4_config, v4_tensors

from dsjax.checkpoint.load import from_hf_tensors
from dsjax.config import ModelConfig
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import make_step
from dsjax.errors import UserError
from dsjax.model import mtp
from dsjax.model.parameter_table import parameter_table
from dsjax.model.rows import GroupShape, unpack
from sharding import MeshSpec

CONFIG = ModelConfig.from_dict(v4_config("wchch", hashed=1, num_nextn_predict_layers=1))
T, PAGES, WINDOWS, LENGTH = 8, 4, 5, 30  # tokens of a page, pages of a row's context and ring
TENSORS = v4_tensors(CONFIG)
TOKENS = np.random.default_rng(2).integers(0, CONFIG.vocab_size, (2, LENGTH))


@functools.cache
def plain():
    """Streams of the two sequences ``[2, S, n, D]`` and logits ``[2, S, V]``; and the MTP module's ``[2, S-1, …]``."""
    table, params = parameter_table(CONFIG, weights="f32"), from_hf_tensors(CONFIG, TENSORS)

    @functools.partial(jax.jit, compiler_options=COMPILE_QUICKLY)
    def run(params):
        model = table.bind(params)
        found = model(TOKENS)
        further = model.predict_further(found.passed[:, :-1], TOKENS[:, 1:])
        return [(one.passed, one.logits) for one in (found, further)]

    return jax.tree.map(np.asarray, run(params))


class Step:
    """The step on a mesh, of which each DP rank has both sequences."""

    def __init__(self, mesh, **options):
        spec = MeshSpec.parse(mesh)
        args = EngineArgs(mesh=mesh, page_size=T, dtype="float32", **options)
        self.step = make_step(args, CONFIG, spec, spec.build(), mtp=True)
        self.params = placed(self.step, from_hf_tensors(CONFIG, TENSORS))
        pages = {"context": spec.dp_size * 2 * PAGES, "window": spec.dp_size * 2 * WINDOWS}
        by_page = NamedSharding(self.step.mesh, P(None, spec.batch_axes))
        self.ranks, self.by_rank = spec.dp_size, NamedSharding(self.step.mesh, P(spec.batch_axes))
        self.cache = empty_groups(self.step.cache_groups, pages, by_page)
        self.filled = jax.device_put(np.zeros((pages["window"], T), bool), self.by_rank)
        self.program = functools.cache(self._program)

    def _program(self, chunk):
        shape = GroupShape(2, chunk, PAGES, self.step.prefill_form, WINDOWS)

        def run(params, cache, filled, packed, following):
            groups, copies = unpack(packed, (shape,)), self.step.placement.tables
            streams, cache, _ = self.step.hidden(params, cache, groups, copies)
            given = params, cache, filled, groups, streams, following, copies
            further, cache, filled, _ = mtp.further(self.step, *given)
            logits = self.step.logits(params, streams), self.step.logits(params, further, module=True)
            return cache, filled, streams, logits[0], further, logits[1]

        return jax.jit(run, compiler_options=COMPILE_QUICKLY)

    def run(self, start, length, chunk):
        """Streams and logits of the sequences' tokens from ``start`` on, ``[ranks, 2, length, …]``, and the MTP module's."""
        rows = {}
        for rank, row in np.ndindex(self.ranks, 2):
            pages = [page for count in (PAGES, WINDOWS) for page in range(row * count, (row + 1) * count)]
            rows[rank, row] = (TOKENS[row, start : start + length], start, pages)
        packed = pack_rows((self.ranks, 2), chunk, PAGES + WINDOWS, rows)
        following = np.zeros((self.ranks, 2, chunk), np.int32)
        behind = TOKENS[:, start + 1 : start + length + 1]
        following[:, :, : behind.shape[1]] = behind
        packed, following = jax.device_put((packed, following.reshape(self.ranks, -1)), self.by_rank)
        self.cache, self.filled, *found = self.program(chunk)(self.params, self.cache, self.filled, packed, following)
        return [np.asarray(one).reshape(self.ranks, 2, chunk, *one.shape[2:])[:, :, :length] for one in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [("dp=1", {}), ("dp=2,tp=4", {}), ("dp=4,ep=2", {}), ("dp=2,ep=1,etp=2", {}), ("dp=2", {"kernels": "plain"})],
    ids=lambda value: value if isinstance(value, str) else value.get("kernels", "native"),
)
def test_a_prompt_and_a_decode_have_the_plain_forms_streams_and_logits_and_so_has_the_mtp_module(mesh, options):
    step = Step(mesh, **options)
    decode = 1 if mesh == "dp=1" else 24  # which is another program
    parts = step.run(0, 21, 24), step.run(21, 8, 24), step.run(29, 1, decode)
    found = [np.concatenate(part, axis=2) for part in zip(*parts, strict=True)]
    for one, expected in zip(found, jax.tree.leaves(plain()), strict=True):
        for rank in one[:, :, : expected.shape[1]]:
            assert np.abs(rank - expected).max() <= 2e-5 * np.abs(expected).max()


def test_a_mesh_that_cuts_a_group_of_the_output_projection_is_refused():
    spec = MeshSpec.parse("tp=8")
    with pytest.raises(UserError, match="tp=8 does not divide the 4 groups"):
        make_step(EngineArgs(mesh="tp=8", page_size=T), CONFIG, spec, spec.build())


def test_with_native_kernels_no_sum_depends_on_mesh_or_batch_and_so_it_is_batch_invariant(kernels):
    spec = MeshSpec.parse("tp=2")
    args = {"mesh": "tp=2", "page_size": T, "dtype": "float32", "batch_invariant": True}
    step = make_step(EngineArgs(**args), CONFIG, spec, spec.build())
    assert step.is_exact
    assert not step.forms_by_kind
    with pytest.raises(UserError, match="--batch-invariant needs the native kernels"):
        make_step(EngineArgs(**args, kernels="plain"), CONFIG, spec, spec.build())
