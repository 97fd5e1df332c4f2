"""What an executor is told to do: one ordered stream of commands, as plain values. No NumPy, no JAX. docs/scheduler.md.

A command can be written to a file, sent to another process and replayed: it names slots and pages, never requests. Arrays are the bytes of
little-endian int32. A new capability adds a command; nothing reaches an executor beside the stream.
"""

from array import array
from collections.abc import Iterable

import msgspec

VERSION = 10
"""The version of the stream. It changes whenever an older reader could misunderstand a newer command."""

ALWAYS = 2**31 - 1
"""`until` of a bias that holds for every token."""
NAME_BYTES = 32
"""Bytes of a page's name, which is a SHA-256 (`extend_hashes` of `dsjax/engine/schedule/pages.py`)."""
WINDOW_NUMBERS = 2**30
"""Numbers from here on, of slots in host memory, of pages that are read or pulled and of chunks, are of window pages."""
TOKEN_MADE = -1
"""`PrefillRow.next_token` where the prompt ends with the row: what follows is the token that the row makes."""


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How a slot's tokens are drawn; vLLM's names and meanings.

    num_prompt_tokens: a token's number in the output is its position minus this; the draw depends on it and on `seed`, a uint64.
    temperature: 0 is greedy. top_k: 0 keeps all. logprobs: wanted beside the token's own; −1: none at all.
    """

    num_prompt_tokens: int
    seed: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int = -1

    @property
    def penalises(self) -> bool:
        """Whether tokens that came before change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """A request gets a slot. What the slot held before is forgotten.

    Attributes:
        start: tokens of the request that are in the cache. token: at position `start`, for a decode row without a prefill row before it.
        counts: int32 pairs (token, 2 × times in the output + 1 if in the prompt), where the request has penalties.
        biases: int32 triples (token, bits of a float32 bias, until): it holds for tokens of the output with a number below `until`. A ban
            is −∞.
        allowed: packed bits of the tokens that may be made at all (bit t % 32 of word t // 32); empty: all.
        guided: whether the slot's tokens depend on the host, so that it must be told of drafts.
    """

    slot: int
    start: int
    token: int
    sampling: Sampling
    counts: bytes = b""
    biases: bytes = b""
    allowed: bytes = b""
    guided: bool = False


class PageChange(msgspec.Struct, frozen=True, array_like=True):
    """Entries `first`, `first + 1`, … of a slot's page table.

    In all commands, numbers from `ExecutorLimits.pages_per_rank` on are of window pages. Their entries stand behind those of the other
    pages, as a ring (`window_columns`).
    """

    slot: int
    first: int
    pages: list[int]


class PrefillRow(msgspec.Struct, frozen=True, array_like=True):
    """Known tokens to be computed.

    Attributes:
        tokens: int32, those at positions `start`, `start + 1`, … next_token: the one after them, or `TOKEN_MADE`.
        limit: tokens that the slot's pages have room for.
        scored: positions, from the first, that predict a prompt token whose log-probability is wanted.
        top_scores: most probable tokens that are wanted beside each of those.
    """

    slot: int
    start: int
    tokens: bytes
    next_token: int
    limit: int
    scored: int = 0
    top_scores: int = 0

    @property
    def length(self) -> int:
        """Tokens of the row."""
        return len(self.tokens) // 4


class Guide(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that a slot with a row in this step may make, where that depends on the tokens before.

    masks: packed bits for the row's first position, and after each draft that may be verified.
    """

    slot: int
    masks: bytes


class RankStep(msgspec.Struct, frozen=True, array_like=True):
    """One DP rank's part of a step. decodes: int32 pairs (slot, limit): rows of the slot's last token and drafts, below `limit`."""

    admissions: list[Admission]
    pages: list[PageChange]
    decodes: bytes
    prefills: list[PrefillRow]
    guides: list[Guide]


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Compute rows of every rank, and make tokens.

    num_drafts: most drafts that a decode row verifies. proposes: drafts made for the next step; 0: the MTP module does not run. Where
    `num_drafts` is 0, it runs in launches with prompts alone.
    """

    ranks: list[RankStep]
    num_drafts: int = 0
    proposes: int = 0


class Copy(msgspec.Struct, frozen=True, array_like=True, tag="copy"):
    """Copy pages: of each rank pairs (from, to), int32. No page stands in two pairs."""

    ranks: list[bytes]


class StorePages(msgspec.Struct, frozen=True, array_like=True, tag="store_pages"):
    """Copy pages to slots of host memory, or write them to the disk, or both.

    ranks: of each rank int32 triples (page, slot, number of the writing); −1: no slot, or no writing. names: of each rank `NAME_BYTES` for
    each page that is written.
    """

    ranks: list[bytes]
    names: list[bytes] = []


class FetchPages(msgspec.Struct, frozen=True, array_like=True, tag="fetch_pages"):
    """Send what is in slots of host memory (int32, of each rank) to the devices, where it is staged until `PlacePages` names its number.

    Numbers from the count of slots on are those of `ReadPages` and `PullPages`: what was read or pulled there is sent, and then forgotten.
    """

    ranks: list[bytes]
    number: int = 0


class ReadPages(msgspec.Struct, frozen=True, array_like=True, tag="read_pages"):
    """Begin to read pages from the disk; the executor reports later which have come (`Executor.page_reports`).

    ranks: of each rank int32 numbers, none of which is in use. names: of each rank `NAME_BYTES` for each of them. drops: of each rank int32
    numbers of earlier ones, read or pulled, that nobody wants any more, come or not.
    """

    ranks: list[bytes]
    names: list[bytes]
    drops: list[bytes]


class SendPages(msgspec.Struct, frozen=True, array_like=True, tag="send_pages"):
    """Copy pages into chunks, which other engines may pull when they are complete.

    ranks: of each rank int32 pairs (chunk, page). Pages of a chunk follow one another, at most `CHUNK_PAGES` of `transfer/messages.py`.
    """

    ranks: list[bytes]


class PullPages(msgspec.Struct, frozen=True, array_like=True, tag="pull_pages"):
    """Begin to pull other engines' chunks; the executor reports later which pages have come (`Executor.page_reports`).

    ranks: for each rank, int32 quadruples (source, chunk, place in the chunk, number that the page gets, as in `ReadPages`), chunk after
    chunk. sources: (number of the prefill side, address of its chunks); a quadruple's source is an index into it.
    """

    ranks: list[bytes]
    sources: list[tuple[int, str]] = []


class DropChunks(msgspec.Struct, frozen=True, array_like=True, tag="drop_chunks"):
    """Keep chunks no longer that `SendPages` has made: int32 numbers. For those that other processes than the first one keep."""

    numbers: bytes


class DropPages(msgspec.Struct, frozen=True, array_like=True, tag="drop_pages"):
    """Delete pages from the disk: all, and then those with these names (`NAME_BYTES` each), after what was to be written before."""

    everything: bool
    names: bytes = b""


class PlacePages(msgspec.Struct, frozen=True, array_like=True, tag="place_pages"):
    """Write what the `FetchPages` of this number staged to pages: int32, of each rank, in the order of its slots.

    Where it could not be launched, nothing is written. What older ones staged is forgotten.
    """

    ranks: list[bytes]
    number: int = 0


class Clear(msgspec.Struct, frozen=True, array_like=True, tag="clear"):
    """Zero pages that may hold values that are not finite: of each rank int32 page numbers.

    Attention weights positions that a query does not see by 0, and 0 × NaN is NaN: the page's next owner would fail too.
    """

    ranks: list[bytes]


class Score(msgspec.Struct, frozen=True, array_like=True, tag="score"):
    """Logits of every position of one sequence, computed through `pages` of rank 0 (int32 both), the last of which may be a ring's."""

    tokens: bytes
    pages: bytes


class Flush(msgspec.Struct, frozen=True, array_like=True, tag="flush"):
    """Zero the cache and reset all slots, as at the start. No request has a slot."""


class ReadLoads(msgspec.Struct, frozen=True, array_like=True, tag="read_loads"):
    """Give how many tokens each expert of each layer computed since the last time, and count from zero."""


class StageExperts(msgspec.Struct, frozen=True, array_like=True, tag="stage_experts"):
    """Send experts of one MoE layer to the ranks that will hold them, into their staging buffers; nothing that steps read changes.

    layer: a row of the placement: the model's MoE layers in order, and behind them the MTP module's. moves: int32 pairs (physical slot that
    holds an expert, physical slot that is to hold it). A rank sends and receives at most `ExpertSlots.per_exchange` experts, and none sends
    two to the same rank.
    """

    layer: int
    moves: bytes


class PlaceExperts(msgspec.Struct, frozen=True, array_like=True, tag="place_experts"):
    """Write what was staged for a layer into its slots, and put the layer's new placement in force.

    slots: int32, the physical slots that are written; each was the second of a pair of a `StageExperts` of this layer since the last
    `PlaceExperts`. physical_to_logical: int32, the logical expert in each physical slot from now on.
    """

    layer: int
    slots: bytes
    physical_to_logical: bytes


class ConnectExperts(msgspec.Struct, frozen=True, array_like=True, tag="connect_experts"):
    """Connect to the expert processes of this `--expert-mesh` at this `--afd-address`.

    The steps that follow send their rows there; if one attention process cannot connect, all stay as they are.
    """

    expert_mesh: str
    afd_address: str


class Custom(msgspec.Struct, frozen=True, array_like=True, tag="custom"):
    """Do what a page source (`--page-source`) and the part of the executor that has registered its name have agreed on."""

    source: str
    ranks: list[bytes]
    names: list[bytes] = []


Command = (
    Step
    | Copy
    | StorePages
    | FetchPages
    | ReadPages
    | SendPages
    | PullPages
    | DropChunks
    | DropPages
    | PlacePages
    | Clear
    | Score
    | Flush
    | ReadLoads
    | StageExperts
    | PlaceExperts
    | ConnectExperts
    | Custom
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Command)


def encode(command: Command) -> bytes:
    """A command as MessagePack."""
    return _encoder.encode(command)


def decode(data: bytes) -> Command:
    """The inverse of `encode`; a `msgspec.ValidationError` where these bytes are no command."""
    return _decoder.decode(data)


def int32s(values: Iterable[int]) -> bytes:
    """Integers as a command holds them."""
    return array("i", values).tobytes()  # JAX runs on little-endian machines alone


def names_of(data: bytes) -> list[bytes]:
    """Pages' names that stand one after the other."""
    return [data[at : at + NAME_BYTES] for at in range(0, len(data), NAME_BYTES)]


def from_int32s(data: bytes) -> array:
    """The inverse of `int32s`."""
    return array("i", data)
