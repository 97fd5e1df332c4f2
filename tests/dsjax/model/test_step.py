"""The step: groups, padding and idle ranks change nothing that is not theirs."""

import dataclasses
import functools

import jax
import ml_dtypes
import numpy as np
import pytest
from layouts import MODELS, TINY
from step_model import PAGES, G, Model

from dsjax.config import ModelConfig
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import make_step
from sharding import MeshSpec, fp8

# Every expert of the layer is used, so that rounding to bf16 cannot change the choice of experts.
SMALL = TINY | {"num_hidden_layers": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4}
CONFIG = ModelConfig.from_dict(SMALL)


@functools.cache
def model(mesh="dp=2", **options):
    return Model(mesh, CONFIG, **options)


def tokens_of(length, seed):
    return np.random.default_rng(seed).integers(2, CONFIG.vocab_size, size=length).tolist()


FIRST, SECOND = tokens_of(6, 0), tokens_of(5, 1)
FIRST_PAGES, SECOND_PAGES = [1, 2], [5, 4]
TOKENS = tokens_of(11, 2)
PROMPTS = [(FIRST, 0, FIRST_PAGES)], [(SECOND, 0, SECOND_PAGES)]
NEXT = [([7], 6, FIRST_PAGES)], [([8], 5, SECOND_PAGES)]


@pytest.mark.slow
def test_groups_in_one_step_give_what_they_give_in_steps_of_their_own(kernels):
    one = model()
    _, cache = one.run(one.empty_cache(), [one.prefill(PROMPTS[0], [])])
    decode, prefill = one.decode(NEXT[0], []), one.prefill([], PROMPTS[1])
    decoded, after_decode = one.run(cache, [decode])
    prefilled, after_both = one.run(after_decode, [prefill])
    mixed, after_mixed = one.run(cache, [decode, prefill])
    np.testing.assert_array_equal(mixed[0, 0], decoded[0, 0])
    np.testing.assert_array_equal(mixed[1, 2], prefilled[1, 0])
    for name in cache:
        np.testing.assert_array_equal(after_mixed[name], after_both[name])
        assert np.any(np.asarray(after_mixed[name]) != np.asarray(cache[name]))


@pytest.mark.parametrize(("name", "mesh"), [("v3.2", "dp=1"), ("v3", "dp=2"), ("v3.2", "dp=2,tp=2")])
def test_a_tokens_mla_form_follows_from_whether_it_is_prompt_or_answer(mesh, name, kernels):
    """And not from the group in which it is computed: a prompt's last token alone, and an answer in chunks, have the same bits."""
    one = Model(mesh, ModelConfig.from_dict(SMALL | MODELS[name] | ({"index_topk": 4} if name == "v3.2" else {})))
    assert one.step.forms_by_kind
    rows = lambda first, last: ([(TOKENS[first:last], first, [1, 2, 3, 6])],) * one.ranks  # noqa: E731

    def computed(*pieces):
        """The logits of the last token, where so many tokens at a time are computed: of a prompt, or as decodes."""
        cache, first = one.empty_cache(), 0
        for count, kind in pieces:
            logits, cache = one.run(cache, [kind(*rows(first, first + count))], prompt_length=8)
            first += count
        return logits[:, 0], jax.tree.map(np.asarray, cache)

    prompts, decodes = one.prefill, one.decode
    alone, cache = computed((6, prompts), (2, prompts), (1, decodes), (1, decodes), (1, decodes))
    for pieces in (
        [(6, prompts), (1, prompts), (1, decodes), (1, decodes), (1, decodes), (1, decodes)],
        [(6, prompts), (5, prompts)],
        [(3, prompts), (4, prompts), (2, prompts), (1, prompts), (1, decodes)],
    ):
        logits, found = computed(*pieces)
        np.testing.assert_array_equal(logits, alone)
        jax.tree.map(np.testing.assert_array_equal, found, cache)


@pytest.mark.parametrize(
    "options", [{}, {"batch_invariant": True}, {"mla_decode": "AM_CC_ME"}, {"kernels": "plain"}, {"dtype": "bfloat16"}]
)
def test_the_kind_of_a_token_matters_where_prompts_and_decodes_have_two_exact_forms(options, kernels):
    args, spec = EngineArgs(**{"dtype": "float32"} | options), MeshSpec.parse("dp=1")
    assert make_step(args, CONFIG, spec, spec.build()).forms_by_kind == (not options)


# One layout each, and both that decode with one form and prefill with another.
CACHES = [{}, {"kv_cache_dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"}]
CACHES += [{"mla_prefill": form, "mla_decode": form} for form in ("A_CC", "CD")]


@pytest.mark.parametrize("options", CACHES, ids=["split", "split, bf16", "split, fp8", "joined", "decompressed"])
def test_a_step_writes_its_active_tokens_slots_and_no_other_byte(options):
    one, rng = model(**options), np.random.default_rng(5)
    empty, kept = one.empty_cache(), one.step.attention.arrays
    before = {key: rng.normal(size=array.shape).astype(kept[key][1]).view(array.dtype) for key, array in empty.items()}
    # One row is at its table's last page, one is shorter than the chunk, and one is padding.
    groups = one.both(([([7], 18, [9, 8, 7, 6, 10])], []), ([(FIRST[:3], 2, [1, 2])], [(SECOND, 0, [5, 4])]))
    written = {(0, 10, 2), (0, 1, 2), (0, 1, 3), (0, 2, 0)}  # rank, page, offset
    written |= {(1, 5, offset) for offset in range(G)} | {(1, 4, 0)}
    _, after = one.run(jax.device_put(before, jax.tree.map(lambda array: array.sharding, empty)), groups)
    for key, array in before.items():
        changed = np.any(np.asarray(after[key]) != array, axis=tuple(range(3, array.ndim)))
        for layer in changed:
            found = {(page // PAGES, page % PAGES, offset) for page, offset in np.argwhere(layer).tolist()}
            assert found == written, key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        # bf16 has 8 bits: a rounding moves a value by at most 2⁻⁹ of itself, 0.2 %. Cached latents are rounded once;
        ({"kv_cache_dtype": "bfloat16"}, 1e-2),
        # e4m3 has 4 bits: a rounding moves a value by at most 2⁻⁴ of its block's largest one;
        ({"kv_cache_dtype": "fp8"}, 1e-1),
        # in bf16 throughout, weights and some ten activations of each layer are rounded, and their errors add up.
        ({"dtype": "bfloat16"}, 5e-2),
    ],
    ids=["bf16 cache", "fp8 cache", "bf16 compute"],
)
def test_fewer_bits_stay_close_to_float32(options, tolerance):
    def logits(one):
        _, cache = one.run(one.empty_cache(), one.both(prompts=PROMPTS))
        return one.run(cache, one.both(NEXT))[0][:, 0]

    exact, rounded = logits(model()), logits(model(**options))
    difference = np.abs(rounded - exact).max() / np.abs(exact).max()
    assert 0 < difference <= tolerance


@pytest.mark.slow
def test_an_fp8_cache_holds_the_rounded_entries_and_every_form_reads_them_alike():
    def prefilled(one):
        return one.run(one.empty_cache(), one.both(prompts=PROMPTS))[1]

    exact, kept = prefilled(model()), prefilled(model(kv_cache_dtype="fp8"))
    values, scale = fp8.quantise(exact["latent"][0])
    # The first layer's entries do not depend on the cache: they are the very ones, rounded.
    np.testing.assert_array_equal(np.asarray(kept["latent"][0]).view(fp8.E4M3), np.asarray(values))
    np.testing.assert_array_equal(np.where(kept["scale"][0] == 0, 1, kept["scale"][0]), scale)
    rope = np.asarray(kept["rope"][0]).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(rope, np.asarray(exact["rope"][0]).astype(rope.dtype))

    held, found = {name: np.asarray(array) for name, array in kept.items()}, {}
    for form in ("CC", "A_CC_ME"):
        one = model(kv_cache_dtype="fp8", mla_decode=form, kernels="plain")
        cache = {name: jax.device_put(held[name], array.sharding) for name, array in one.empty_cache().items()}
        found[form] = one.run(cache, [one.decode(*NEXT)])[0][:, 0]
    largest = np.abs(found["CC"]).max()
    for form, logits in found.items():
        # A last bit of float32 may turn the rounding of the decoded token's own entry.
        assert np.abs(logits - found["CC"]).max() <= 1e-2 * largest, form


@pytest.mark.slow
def test_a_report_counts_tokens_without_padding_and_an_fp8_wire_moves_logits_by_its_rounding_only():
    exact, rounded = model(), model(report=True, dispatch="padded", dispatch_wire="fp8")
    found = [one.run(one.empty_cache(), one.both(prompts=PROMPTS))[0][:, 2] for one in (exact, rounded)]
    # e4m3 has 3 mantissa bits: values are off by up to 2⁻⁴ of themselves, sums of many by a small part of that.
    assert 0 < np.abs(found[0] - found[1]).max() <= 2**-4 * np.abs(found[0]).max()
    pairs = (len(FIRST) + len(SECOND)) * CONFIG.num_experts_per_tok
    assert np.asarray(rounded.reports["tokens_per_expert"]).sum() == pairs * CONFIG.num_moe_layers
    assert set(np.asarray(rounded.reports["rounds"]).ravel().tolist()) == {1}


@pytest.mark.parametrize(
    ("mesh", "options", "load"),
    [
        ("dp=8", {}, 8 * 4 / 32 * 8),  # 8 ranks of 8 tokens, 4 experts each, of 32
        ("dp=8,ep=2", {}, 2 * 8 * 4 / 32),  # a copy of the experts sees the tokens of its own two ranks
        ("dp=2,tp=4", {}, 2 * 8 * 4 / 32),  # a replica's tokens are split over its devices, not repeated
        ("dp=8", {"moe_chunk_tokens": 2}, 8 * 2 * 4 / 32),
        ("tp=8,ep=1", {}, 8 * 4 / 32),  # each device has a part of every expert, for which it sees all tokens
        ("dp=8,ep=2,etp=2", {}, 4 * 8 * 4 / 32),  # and here those of all ranks that share a copy of the experts
    ],
)
def test_the_expert_product_is_chosen_for_the_pairs_that_even_routing_brings(mesh, options, load):
    spec = MeshSpec.parse(mesh)
    step = make_step(EngineArgs(mesh=mesh, **options), ModelConfig.from_dict(TINY), spec, spec.build())
    assert step.experts.mean_load(8 * spec.dp_size) == load


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "plain"])
def test_a_rule_that_a_user_changes_changes_the_program_and_not_its_numbers(kernels):
    """Heads whole on every device, in place of split over ``tp``: attention reads the rule, as its weights do."""
    usual, whole = (Model("dp=2,tp=2", CONFIG, kernels=kernels, rules=rules) for rules in (None, {"heads": ()}))
    logits = [one.run(one.empty_cache(), [one.prefill(*PROMPTS)])[0] for one in (usual, whole)]
    np.testing.assert_allclose(*logits, atol=1e-5)
    output = [one.params["moe_layers.attn.o.weight"] for one in (usual, whole)]
    shards = [array.sharding.shard_shape(array.shape)[1] for array in output]
    assert shards[1] == 2 * shards[0]


def test_a_tied_head_in_bfloat16_is_read_as_it_lies(kernels):
    """Widening it would write and read a float32 copy, of twice its bytes, in each step."""
    config = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    tied = Model("dp=1", config, weights="fp8")
    V, D = config.vocab_size, config.hidden_size
    hidden = np.random.default_rng(0).normal(size=(1, 3, D)).astype(np.float32)
    assert tied.step.table.infos["embed.weight"].dtype == ml_dtypes.bfloat16
    logits = jax.jit(tied.step.logits)
    assert f"{V}x{D}xf32>" not in logits.lower(tied.params, hidden).as_text()
    embedding = np.asarray(tied.params["embed.weight"]).view(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_allclose(logits(tied.params, hidden)[0], hidden[0] @ embedding.T, atol=1e-5)
