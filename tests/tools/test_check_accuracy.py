"""The tool that tells what fewer bits cost: its figures, and each format's bounds on a little of the held-out text."""

import numpy as np
import pytest

from tools.check_accuracy import BOUNDS, FORMATS, compare, read, refusal
from tools.demo.corpus import read_corpus


def test_figures_worked_out_by_hand_where_float32_is_decided_and_where_it_is_not():
    exact = [np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], np.float32))]
    came = [np.array([0, 2])]
    same = compare(exact, exact, came, size=2)
    assert same["bits_a_byte"] == pytest.approx((1 + np.log2(10)) / 2)
    assert (same["same_token"], same["same_token_where_clear"], same["divergence_bits"]) == (1, 1, pytest.approx(0))
    other = [np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]], np.float32))]
    found = compare(other, exact, came, size=2)
    assert found["bits_a_byte"] == pytest.approx((2 + np.log2(10)) / 2)
    assert found["same_token"] == 0.5
    assert found["divergence_bits"] == pytest.approx((0.5 * 1 - 0.25 * 1) / 2)
    exact = [np.array([[8.0, 8.1, 0], [8, 0, 0]])]  # 0.1 of 8.1 is less than a 32nd
    other = [np.array([[8.1, 8.0, 0], [8, 0, 0]])]
    found = compare(other, exact, [np.array([0, 0])], size=2)
    assert (found["same_token"], found["same_token_where_clear"]) == (0.5, 1)


def test_what_is_beyond_a_bound_is_named():
    exact = {"bits_a_byte": 1.0, "same_token_where_clear": 1.0, "divergence_bits": 0.0}
    assert refusal("FP8 cache", exact, exact) is None
    assert "bits a byte" in refusal("FP8 cache", exact | {"bits_a_byte": 1.1}, exact)
    assert "same token" in refusal("FP8 cache", exact | {"same_token_where_clear": 0.9}, exact)
    assert "divergence" in refusal("FP8 cache", exact | {"divergence_bits": float("nan")}, exact)
    assert BOUNDS.keys() == FORMATS.keys()


@pytest.mark.slow
def test_formats_keep_their_bounds_on_a_little_of_the_held_out_text():
    text = b"\n".join(file.content for file in read_corpus()[1])[:3000].decode(errors="ignore")
    size, sizes = len(text.encode()), {"max_num_batched_tokens": 1024, "prefill_chunk": 1024}  # one program of each
    exact, tokens, _ = read("dp=1", [text], "float32", sizes)
    reference = compare(exact, exact, tokens, size)
    for name in ("all four FP8", "bfloat16"):  # weights, activations and cache: one device sends nothing
        logits, _, _ = read("dp=1", [text], name, FORMATS[name] | sizes)
        assert refusal(name, compare(logits, exact, tokens, size), reference) is None
