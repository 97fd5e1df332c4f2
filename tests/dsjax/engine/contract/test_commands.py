"""Commands: what is decoded is what was encoded, an unknown command is refused, and a step of many requests is small."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsjax.engine.contract import commands
from dsjax.engine.contract.commands import (
    Admission,
    Clear,
    Copy,
    Custom,
    DropPages,
    FetchPages,
    Flush,
    Guide,
    PageChange,
    PlaceExperts,
    PlacePages,
    PrefillRow,
    PullPages,
    RankStep,
    ReadLoads,
    ReadPages,
    Sampling,
    Score,
    SendPages,
    StageExperts,
    Step,
    StorePages,
    decode,
    encode,
    from_int32s,
    int32s,
)

integer = st.integers(-(2**31), 2**31 - 1)
natural = st.integers(0, 2**31 - 1)
real = st.floats(allow_nan=False)
packed = st.lists(integer, max_size=5).map(int32s)
samplings = st.builds(
    Sampling, natural, st.integers(0, 2**32 - 1), real, real, natural, real, real, real, real, st.integers(-1, 20)
)
admissions = st.builds(Admission, natural, natural, natural, samplings, packed, packed, packed, st.booleans())
ranks = st.builds(
    RankStep,
    st.lists(admissions, max_size=2),
    st.lists(st.builds(PageChange, natural, natural, st.lists(natural, max_size=4)), max_size=2),
    packed,
    st.lists(st.builds(PrefillRow, natural, natural, packed, integer, natural, natural, natural), max_size=2),
    st.lists(st.builds(Guide, natural, packed), max_size=2),
)
of_each_rank = st.lists(packed, max_size=3)
every_command = st.one_of(
    st.builds(Step, st.lists(ranks, max_size=3), st.integers(0, 8), st.integers(0, 8)),
    st.builds(Copy, of_each_rank),
    st.builds(FetchPages, of_each_rank, natural),
    st.builds(PlacePages, of_each_rank, natural),
    st.builds(StorePages, of_each_rank, of_each_rank),
    st.builds(ReadPages, of_each_rank, of_each_rank, of_each_rank),
    st.builds(SendPages, of_each_rank),
    st.builds(PullPages, of_each_rank, st.lists(st.tuples(integer, st.text(max_size=9)), max_size=2)),
    st.builds(commands.DropChunks, packed),
    st.builds(DropPages, st.booleans(), packed),
    st.builds(Clear, of_each_rank),
    st.builds(Score, packed, packed),
    st.just(Flush()),
    st.just(ReadLoads()),
    st.builds(StageExperts, natural, packed),
    st.builds(PlaceExperts, natural, packed, packed),
    st.builds(commands.PrepareExperts, natural, st.text(), st.text()),
    st.builds(commands.ChangeExperts, natural, st.booleans()),
    st.builds(Custom, st.text(), st.lists(packed), st.lists(packed)),
)


@settings(max_examples=200, deadline=None)
@given(every_command)
def test_decoding_gives_back_what_was_encoded(command):
    found = decode(encode(command))
    assert found == command
    assert type(found) is type(command)


def test_every_command_of_the_union_is_generated():
    every = {Step, Copy, Clear, Score, Flush, ReadLoads, StageExperts, PlaceExperts, Custom}
    every |= {StorePages, FetchPages, ReadPages, DropPages, PlacePages, SendPages, PullPages, commands.DropChunks}
    every |= {commands.PrepareExperts, commands.ChangeExperts}
    assert every == set(commands.Command.__args__)


@given(st.lists(integer, max_size=9))
def test_integers_come_back_from_their_bytes(values):
    assert list(from_int32s(int32s(values))) == values
    assert len(int32s(values)) == 4 * len(values)


def test_the_bytes_of_a_command_are_pinned_to_their_version():
    # Whoever changes these bytes changes what older readers see, and must raise VERSION.
    assert commands.VERSION == 8
    row = PrefillRow(1, 2, int32s([7]), commands.TOKEN_MADE, 16)
    own = RankStep([Admission(1, 2, 7, Sampling(3, 9))], [PageChange(1, 0, [5])], int32s([0, 16]), [row], [])
    assert encode(Step([own], 0, 0)).hex() == (
        "94a473746570919591980102079a0309cb0000000000000000cb3ff000000000000000cb0000000000000000cb0000000000000000"
        "cb0000000000000000cb3ff0000000000000ffc400c400c400c2919301009105c4080000000010000000919701"
        "02c40407000000ff100000900000"
    )
    moving = (ReadLoads(), StageExperts(1, b""), PlaceExperts(1, b"", b""))
    moving += (StorePages([b""], [b""]), FetchPages([b""]), ReadPages([b""], [b""], [b""]), DropPages(False))
    moving += (PlacePages([b""]), SendPages([b""]), PullPages([b""]), commands.DropChunks(b""), Custom("k", [b""]))
    moving += (commands.PrepareExperts(1, "ep=4", "a:1"), commands.ChangeExperts(1, True))
    assert [encode(command).hex() for command in (Copy([b""]), Clear([b""]), Score(b"", b""), Flush(), *moving)] == [
        "92a4636f707991c400",
        "92a5636c65617291c400",
        "93a573636f7265c400c400",
        "91a5666c757368",
        "91aa726561645f6c6f616473",
        "93ad73746167655f6578706572747301c400",
        "94ad706c6163655f6578706572747301c400c400",
        "93ab73746f72655f706167657391c40091c400",
        "93ab66657463685f706167657391c40000",
        "94aa726561645f706167657391c40091c40091c400",
        "93aa64726f705f7061676573c2c400",
        "93ab706c6163655f706167657391c40000",
        "92aa73656e645f706167657391c400",
        "93aa70756c6c5f706167657391c40090",
        "92ab64726f705f6368756e6b73c400",
        "94a6637573746f6da16b91c40090",
        "94af707265706172655f6578706572747301a465703d34a3613a31",
        "93ae6368616e67655f6578706572747301c3",
    ]


@pytest.mark.parametrize(
    "data",
    [
        msgspec.msgpack.encode(["move", [b""]]),
        msgspec.msgpack.encode(["copy", "x"]),
        msgspec.msgpack.encode({"copy": []}),
        encode(Flush())[:-1],
        b"",
    ],
    ids=["unknown tag", "wrong field", "no array", "truncated", "nothing"],
)
def test_bytes_that_are_no_command_are_refused(data):
    with pytest.raises(msgspec.DecodeError):
        decode(data)


def a_step_of_decodes(num_ranks: int, rows: int, new_pages: bool = False) -> Step:
    """All requests decode. With `new_pages` one row of 16 begins a page: the share that does at a page size of 16."""
    ranks = []
    for _ in range(num_ranks):
        decodes = int32s(number for slot in range(rows) for number in (slot, 4096 + 16 * slot))
        changes = [PageChange(slot, 256, [70_000 + slot]) for slot in range(0, rows, 16)] if new_pages else []
        ranks.append(RankStep([], changes, decodes, [], []))
    return Step(ranks)


@pytest.mark.parametrize(("num_ranks", "rows"), [(32, 32), (1, 1024)])
def test_a_step_of_1024_decodes_takes_less_than_ten_bytes_a_request(num_ranks, rows):
    # Each row has two integers; of 16 rows one begins a page in each step, at a page size of 16.
    plain, with_pages = (len(encode(a_step_of_decodes(num_ranks, rows, new))) for new in (False, True))
    print(f"{num_ranks} x {rows}: {plain:,} bytes, {with_pages:,} with new pages")
    assert 8 * 1024 < plain < with_pages < 10 * 1024
