"""Commands: what is decoded is what was encoded, an unknown command is refused, and a step of many requests is small."""

from typing import get_args

import msgspec
import pytest

from dsjax.engine.contract import commands
from dsjax.engine.contract.commands import decode, encode, int32s

ROW = commands.PrefillRow(1, 2, int32s([7]), commands.TOKEN_MADE, 16)
ADMISSION = commands.Admission(1, 2, 7, commands.Sampling(3, 9))
STEP = commands.Step(
    [commands.RankStep([ADMISSION], [commands.PageChange(1, 0, [5])], int32s([0, 16]), [ROW], [])], 0, 0
)
PINNED = [
    (
        STEP,
        "94a473746570919591980102079a0309cb0000000000000000cb3ff000000000000000cb0000000000000000cb0000000000000000"
        "cb0000000000000000cb3ff0000000000000ffc400c400c400c2919301009105c4080000000010000000919701"
        "02c40407000000ff100000900000",
    ),
    (commands.Copy([b""]), "92a4636f707991c400"),
    (commands.Clear([b""]), "92a5636c65617291c400"),
    (commands.Score(b"", b""), "93a573636f7265c400c400"),
    (commands.Flush(), "91a5666c757368"),
    (commands.ReadLoads(), "91aa726561645f6c6f616473"),
    (commands.StageExperts(1, b""), "93ad73746167655f6578706572747301c400"),
    (commands.PlaceExperts(1, b"", b""), "94ad706c6163655f6578706572747301c400c400"),
    (commands.StorePages([b""], [b""]), "93ab73746f72655f706167657391c40091c400"),
    (commands.FetchPages([b""]), "93ab66657463685f706167657391c40000"),
    (commands.ReadPages([b""], [b""], [b""]), "94aa726561645f706167657391c40091c40091c400"),
    (commands.DropPages(False), "93aa64726f705f7061676573c2c400"),
    (commands.PlacePages([b""]), "93ab706c6163655f706167657391c40000"),
    (commands.SendPages([b""]), "92aa73656e645f706167657391c400"),
    (commands.PullPages([b""]), "93aa70756c6c5f706167657391c40090"),
    (commands.DropChunks(b""), "92ab64726f705f6368756e6b73c400"),
    (commands.Custom("k", [b""]), "94a6637573746f6da16b91c40090"),
    (commands.ConnectExperts("ep=4", "a:1"), "93af636f6e6e6563745f65787065727473a465703d34a3613a31"),
]


def test_the_bytes_of_every_command_are_pinned_to_their_version_and_decode_to_the_command():
    # Whoever changes these bytes changes what older readers see, and must raise commands.VERSION.
    assert commands.VERSION == 10
    assert {type(command) for command, _ in PINNED} == set(get_args(commands.Command))
    for command, data in PINNED:
        assert encode(command).hex() == data
        assert decode(bytes.fromhex(data)) == command


def test_a_step_with_every_field_set_is_decoded_as_it_was_encoded():
    sampling = commands.Sampling(3, 2**64 - 1, 0.5, 0.9, 4, 0.1, 1.0, -1.0, 1.25, 20)
    admission = commands.Admission(1, 2, -7, sampling, int32s([1, -1]), int32s([2]), int32s([3]), True)
    row, guide = commands.PrefillRow(1, 2, int32s([7, -(2**31)]), -1, 16, 4, 2), commands.Guide(1, int32s([-1]))
    rank = commands.RankStep([admission], [commands.PageChange(1, 0, [5, 6])], int32s([0, 16]), [row], [guide])
    command = commands.Step([rank, commands.RankStep([], [], b"", [], [])], 3, 4)
    assert decode(encode(command)) == command


NO_COMMANDS = {
    "unknown tag": msgspec.msgpack.encode(["move", [b""]]),
    "wrong field": msgspec.msgpack.encode(["copy", "x"]),
    "no array": msgspec.msgpack.encode({"copy": []}),
    "truncated": encode(commands.Flush())[:-1],
    "nothing": b"",
}


@pytest.mark.parametrize("data", NO_COMMANDS.values(), ids=NO_COMMANDS)
def test_bytes_that_are_no_command_are_refused(data):
    with pytest.raises(msgspec.DecodeError):
        decode(data)


@pytest.mark.parametrize(("num_ranks", "rows"), [(32, 32), (1, 1024)])
def test_a_step_of_1024_decodes_takes_less_than_ten_bytes_a_request(num_ranks, rows):
    """With a page size of 16, one row in 16 begins a page in each step."""
    decodes = int32s(number for slot in range(rows) for number in (slot, 4096 + 16 * slot))
    changes = [commands.PageChange(slot, 256, [70_000 + slot]) for slot in range(0, rows, 16)]
    step = commands.Step([commands.RankStep([], changes, decodes, [], [])] * num_ranks)
    assert 8 * 1024 < len(encode(step)) < 10 * 1024
