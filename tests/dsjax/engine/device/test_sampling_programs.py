"""Drawing with drafts draws what decoding alone draws: a text does not depend on its drafts. Also tests `device/programs.py`.

So texts are distributed exactly as without drafts, which is rejection sampling (Leviathan et al. 2023, arXiv 2211.17192);
`test_sampler.py` holds the distribution of each draw. A Markov model of six tokens stands in for the model, and the programs are those
that serving runs.
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.engine.contract.commands import ALWAYS
from dsjax.engine.device import device_state, sampling_programs
from dsjax.engine.device.device_state import DeviceState
from dsjax.engine.device.sampler import SamplingOps
from dsjax.engine.device.slots import LaunchShape, Positions, StepRows
from dsjax.model.rows import GroupShape
from sharding import MeshSpec, Rules

pytestmark = pytest.mark.slow  # all together

V, SLOTS, BATCHES, LENGTH, DRAFTS = 6, 256, 8, 3, 2
PROMPT = (2, 4)  # two tokens; the first is in the cache
LOGITS = np.random.default_rng(11).normal(scale=1.2, size=(V, V)).astype(np.float32)
"""Row i has the logits of the token that follows token i."""
DRAFTED = (3, 0, 5, 2, 1, 4)
"""What is drafted after each token: neither its most probable successor nor, for every token, an improbable one."""
WIDTH = 1 + DRAFTS

BIASES = ((5, 1.0, 2), (2, -0.5, ALWAYS), (0, -np.inf, 1))
CASES = {
    "temperature": {"temperature": 0.8},
    "min_p": {"min_p": 0.25},
    "top_k, top_p and min_p": {"top_k": 4, "top_p": 0.9, "min_p": 0.05, "temperature": 1.3},
    "penalties": {"presence": 0.4, "frequency": 0.7, "repetition": 1.4},
    "all": {"temperature": 1.2, "top_p": 0.95, "min_p": 0.02, "frequency": 0.5, "biases": BIASES},
}
DEFAULTS = dict.fromkeys(("temperature", "top_p", "repetition"), 1.0)
DEFAULTS |= dict.fromkeys(("top_k", "min_p", "presence", "frequency"), 0.0)


@functools.cache
def programs():
    """A step of all slots as serving runs it: drafts entered, drawn, committed. The biases are a program of their own."""
    spec = MeshSpec.parse("dp=1")
    of_logits = Rules.for_mesh(spec).spec(("ranks", None, "vocab"))
    step = SimpleNamespace(spec=spec, mesh=spec.build(), logits_spec=lambda positions: of_logits)
    slots, nothing = jnp.arange(SLOTS, dtype=jnp.int32)[None], jnp.zeros((1, 0), jnp.int32)
    every = jnp.full((1, SLOTS * WIDTH, 1), -1, jnp.int32)
    shape = LaunchShape(GroupShape(SLOTS, WIDTH, 1, "CC"), None, 1)

    def positions_of(state: DeviceState, drafted):
        tokens = [state.slots[..., device_state.LAST_TOKEN]]
        for _ in range(DRAFTS):
            tokens.append(drafted[tokens[-1]])
        length = jnp.full_like(slots, WIDTH)
        start = state.slots[..., device_state.START]
        at = Positions.of(StepRows(slots, start, length, length, jnp.stack(tokens, -1), *[nothing] * 5), shape)
        return at, jnp.asarray(LOGITS)[at.token]

    @jax.jit
    def biased(state, drafted, biases):
        at, raw = positions_of(state, drafted)
        return sampling_programs.add_biases(step, state, at, raw, biases)

    @jax.jit
    def draw(state, drafted, biased, truncation, penalties):
        at, raw = positions_of(state, drafted)
        biased = raw if biased is None else biased
        wanted = SamplingOps(truncation, penalties, False)
        state, outcome = sampling_programs.draw(step, state, at, raw, biased, every, wanted)
        return state, outcome.reshape(SLOTS, WIDTH)

    return biased, draw


def start(settings: dict[str, float], seeds: np.ndarray) -> DeviceState:
    names = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
    floats = np.array([settings[name] for name in names], np.float32).view(np.int32)
    rows = np.zeros((1, SLOTS, device_state.DRAFTS + DRAFTS), np.int32)
    rows[..., : device_state.DRAFTS] = [len(PROMPT) - 1, PROMPT[-1], 0, len(PROMPT), 0, 0, settings["top_k"], *floats]
    rows[..., device_state.SAMPLING + 1] = seeds
    counts = np.zeros((1, SLOTS, V), np.uint16)
    counts[..., list(PROMPT)] = 1
    state = DeviceState(cache={}, filled=None, tables=None, slots=rows, counts=counts, copies=None, loads=None)
    return jax.tree.map(jnp.asarray, state)


def run(drafted, biases=(), **settings) -> tuple[np.ndarray, np.ndarray]:
    """`[texts, LENGTH]` tokens, and how many tokens each slot made in its first step."""
    biased, draw = programs()
    s = DEFAULTS | settings
    truncation = s["top_k"] > 0 or s["top_p"] < 1
    penalties = (s["presence"], s["frequency"], s["repetition"]) != (0, 0, 1)
    entries = [
        (position, token, int(np.float32(bias).view(np.int32)), until)
        for position in range(SLOTS * WIDTH)
        for token, bias, until in biases
    ]
    packed = jnp.asarray(np.array(entries, np.int32).reshape(1, -1, 4)) if entries else None
    texts, first, drafted = [], [], jnp.asarray(drafted)
    for batch in range(BATCHES):
        state, made = start(s, np.arange(batch * SLOTS, (batch + 1) * SLOTS)), []
        for _ in range(LENGTH):  # each makes at least one token
            logits = None if packed is None else biased(state, drafted, packed)
            state, tokens = draw(state, drafted, logits, truncation, penalties)
            made.append(np.asarray(tokens))
        texts += [[token for token in own if token >= 0][:LENGTH] for own in np.concatenate(made, axis=1)]
        first.append((made[0] >= 0).sum(axis=1))
    return np.array(texts), np.concatenate(first)


@pytest.mark.parametrize("name", CASES)
def test_the_same_seeds_give_the_same_text_whatever_is_drafted(name):
    texts, made = run(DRAFTED, **CASES[name])
    others, other_made = run((1,) * V, **CASES[name])
    np.testing.assert_array_equal(others, texts)
    assert set(made) == set(range(1, WIDTH + 1)), "no draft was accepted, one, and both"
    assert (other_made != made).any()
    assert len(np.unique(texts, axis=0)) > 20
