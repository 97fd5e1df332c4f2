"""Tokens to text in pieces: no piece shows half a character, and stop strings do not depend on how the text is cut."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import tiny_tokenizer

from dsjax.engine.text.stop_strings import StopStrings
from dsjax.engine.text.tokenizer import IncrementalDetokenizer, Tokenizer


def in_pieces(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    return "".join(detokenizer.push(i) for i in ids) + detokenizer.flush()


@given(ids=st.lists(st.integers(0, 310), max_size=40), skip=st.booleans())
def test_pieces_are_the_whole_for_any_tokens(ids, skip):
    tokenizer = tiny_tokenizer()
    assert in_pieces(tokenizer, ids, skip) == tokenizer.decode(ids, skip)


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 129279), max_size=40), skip=st.booleans())
def test_pieces_are_the_whole_with_the_real_vocabulary(r1, ids, skip):
    assert in_pieces(r1, ids, skip) == r1.decode(ids, skip)


def test_kept_special_tokens_stay_where_others_are_skipped():
    tokenizer = tiny_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer, True, (tokenizer.eos_id,))
    pieces = [detokenizer.push(token) for token in (tokenizer.bos_id, *tokenizer.encode("a", False), tokenizer.eos_id)]
    assert pieces == ["", "a", tokenizer.special_tokens["eos_token"]]


@given(text=st.text(max_size=30))
def test_no_piece_ever_shows_half_a_character(text):
    tokenizer, seen = tiny_tokenizer(), ""
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token in tokenizer.encode(text, add_special_tokens=False):
        seen += detokenizer.push(token)
        assert text.startswith(seen)
    assert seen == text


def naive_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the meaning that pieces must not change."""
    for end in range(1, len(text) + 1):
        if complete := [stop for stop in stops if text[:end].endswith(stop)]:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(
    pieces=st.lists(st.text("ab.", max_size=5), max_size=12),
    stops=st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(pieces, stops, include):
    checker, seen = StopStrings(stops, include), ""
    for piece in pieces:
        seen += checker.push(piece)
        if checker.matched is not None:
            break
    else:
        seen += checker.flush()
    assert (seen, checker.matched) == naive_stop("".join(pieces), stops, include)


def test_text_is_held_back_only_while_it_may_become_a_stop_string():
    checker = StopStrings(["</s>"])
    assert [checker.push(piece) for piece in ("a", "<", "/", "s", "x", "<")] == ["a", "", "", "", "</sx", ""]
