"""Commands to an executor, one ordered stream of plain values. No NumPy, no JAX. See docs/scheduler.md.

A command can be written to a file, sent to another process and replayed: it names slots and pages, never requests. Arrays are bytes of
little-endian int32. A new capability adds a command; the stream is the only input of an executor.
"""

from array import array
from collections.abc import Iterable

import msgspec

VERSION = 10
"""Version of the stream. It changes whenever an older reader could misinterpret a newer command."""

ALWAYS = 2**31 - 1
"""`until` of a bias that applies to every token."""
NAME_BYTES = 32
"""Length in bytes of a page's name, a SHA-256 (`extend_hashes` of `dsjax/engine/schedule/pages.py`)."""
WINDOW_NUMBERS = 2**30
"""First number of window pages among host-memory slots, pages read or pulled, and chunks (KV transfer units)."""
TOKEN_MADE = -1
"""`PrefillRow.next_token` if the prompt ends with the row: the next token is the one that the row samples."""


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """Sampling parameters of a slot, with vLLM's names and meanings."""

    # a token's index in the output is its position minus this. The draw depends on the index and on `seed`, a uint64
    num_prompt_tokens: int
    seed: int
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int = -1  # number of top log-probabilities besides the token's own; −1: none at all

    @property
    def penalises(self) -> bool:
        """Whether earlier tokens change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """Assign a slot to a request. The slot's earlier state is reset."""

    slot: int
    start: int  # number of the request's tokens in the cache
    token: int  # token at position `start`, for a decode row that no prefill row precedes
    sampling: Sampling
    # int32 pairs (token, 2 × times in the output + 1 if in the prompt), if the request has penalties
    counts: bytes = b""
    # int32 triples (token, bits of a float32 bias, until). A bias applies to output tokens with an index below `until`; −∞ bans the token
    biases: bytes = b""
    allowed: bytes = b""  # bitmask of the tokens that may be sampled (bit t % 32 of word t // 32); empty: all
    guided: bool = False  # whether the host computes the slot's token masks (`Guide`) and therefore needs its drafts


class PageChange(msgspec.Struct, frozen=True, array_like=True):
    """New entries `first`, `first + 1`, … of a slot's page table.

    In all commands, page numbers from `ExecutorLimits.pages_per_rank` on are window pages. Their entries follow the entries of the other
    pages in the table, as a ring buffer (`window_columns`).
    """

    slot: int
    first: int
    pages: list[int]


class PrefillRow(msgspec.Struct, frozen=True, array_like=True):
    """Prompt tokens to compute."""

    slot: int
    start: int
    tokens: bytes  # int32 tokens at positions `start`, `start + 1`, …
    next_token: int  # the token after them, or `TOKEN_MADE`
    limit: int  # number of tokens that the slot's pages can hold
    scored: int = 0  # number of leading positions that predict a prompt token with a requested log-probability
    top_scores: int = 0  # most probable tokens to return for each scored position

    @property
    def length(self) -> int:
        """Number of tokens in the row."""
        return len(self.tokens) // 4


class Guide(msgspec.Struct, frozen=True, array_like=True):
    """Allowed tokens of a slot with a row in this step, if they depend on the preceding tokens."""

    slot: int
    masks: bytes  # one bitmask for the row's first position, and one after each draft that may be verified


class RankStep(msgspec.Struct, frozen=True, array_like=True):
    """One DP rank's part of a step."""

    admissions: list[Admission]
    pages: list[PageChange]
    decodes: bytes  # int32 pairs (slot, limit), rows of the slot's last token and drafts at positions < `limit`
    prefills: list[PrefillRow]
    guides: list[Guide]


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Compute the rows of every rank and sample tokens."""

    ranks: list[RankStep]
    num_drafts: int = 0  # maximum number of drafts that a decode row verifies
    # number of drafts to make for the next step; 0: the MTP module does not run. If `num_drafts` is 0, the module runs only in launches
    # with prompts
    proposes: int = 0


class Copy(msgspec.Struct, frozen=True, array_like=True, tag="copy"):
    """Copy pages."""

    ranks: list[bytes]  # for each rank int32 pairs (from, to). No page occurs in two pairs


class StorePages(msgspec.Struct, frozen=True, array_like=True, tag="store_pages"):
    """Copy pages to host-memory slots, to disk, or both."""

    ranks: list[bytes]  # for each rank int32 triples (page, slot, write number); −1: no slot, or no write
    names: list[bytes] = []  # for each rank `NAME_BYTES` for each page to write


class FetchPages(msgspec.Struct, frozen=True, array_like=True, tag="fetch_pages"):
    """Send host-memory slots (int32, for each rank) to the devices and stage them there until the `PlacePages` with the same `number`.

    Slot numbers from the number of slots on refer to pages of `ReadPages` and `PullPages`, which are released once they are sent.
    """

    ranks: list[bytes]
    number: int = 0


class ReadPages(msgspec.Struct, frozen=True, array_like=True, tag="read_pages"):
    """Start reading pages from disk. The executor reports later which pages have arrived (`Executor.page_reports`)."""

    ranks: list[bytes]  # for each rank int32 numbers that are not in use
    names: list[bytes]  # for each rank `NAME_BYTES` for each number
    # for each rank int32 numbers of pages read or pulled earlier that are no longer needed, whether they have arrived or not
    drops: list[bytes]


class SendPages(msgspec.Struct, frozen=True, array_like=True, tag="send_pages"):
    """Copy pages into chunks (KV transfer units). Other engines may pull a chunk once it is complete."""

    # for each rank int32 pairs (chunk, page). A chunk's pairs are consecutive, at most `CHUNK_PAGES` of `transfer/messages.py`
    ranks: list[bytes]


class PullPages(msgspec.Struct, frozen=True, array_like=True, tag="pull_pages"):
    """Start pulling other engines' chunks. The executor reports later which pages have arrived (`Executor.page_reports`)."""

    # for each rank int32 quadruples (source, chunk, index in the chunk, new page number as in `ReadPages`), grouped by chunk
    ranks: list[bytes]
    # (number of the prefill side, address of its chunks); a quadruple's source is an index into it
    sources: list[tuple[int, str]] = []


class DropChunks(msgspec.Struct, frozen=True, array_like=True, tag="drop_chunks"):
    """Release chunks made by `SendPages` (int32 numbers) in processes other than the first."""

    numbers: bytes


class DropPages(msgspec.Struct, frozen=True, array_like=True, tag="drop_pages"):
    """Delete pages from disk, after all earlier writes: all pages if `everything`, then the pages with these names (`NAME_BYTES` each)."""

    everything: bool
    names: bytes = b""


class PlacePages(msgspec.Struct, frozen=True, array_like=True, tag="place_pages"):
    """Write the data staged by the `FetchPages` with this number to pages (int32, for each rank, in the order of its slots).

    If that `FetchPages` could not be launched, nothing is written. Data staged by earlier ones is released.
    """

    ranks: list[bytes]
    number: int = 0


class Clear(msgspec.Struct, frozen=True, array_like=True, tag="clear"):
    """Zero pages that may hold NaN or infinite values: int32 page numbers for each rank.

    Attention multiplies masked positions by a weight of 0, and 0 × NaN is NaN, so the page's next owner would fail too.
    """

    ranks: list[bytes]


class Score(msgspec.Struct, frozen=True, array_like=True, tag="score"):
    """Compute the logits of every position of one sequence in `pages` of rank 0 (int32 both). The last pages may be a window ring."""

    tokens: bytes
    pages: bytes


class Flush(msgspec.Struct, frozen=True, array_like=True, tag="flush"):
    """Zero the cache and reset all slots to the initial state. No request may have a slot."""


class ReadLoads(msgspec.Struct, frozen=True, array_like=True, tag="read_loads"):
    """Return the number of tokens per expert and layer since the last `ReadLoads`, and reset the counts."""


class StageExperts(msgspec.Struct, frozen=True, array_like=True, tag="stage_experts"):
    """Send experts of one MoE layer to the staging buffers of the ranks that will hold them. Steps continue to read the old slots."""

    layer: int  # row of the placement: the model's MoE layers in order, then the MTP module's
    # int32 pairs (source physical slot, target physical slot). A rank sends and receives at most `ExpertSlots.per_exchange` experts, and
    # sends at most one to each rank
    moves: bytes


class PlaceExperts(msgspec.Struct, frozen=True, array_like=True, tag="place_experts"):
    """Write a layer's staged experts into its slots, and activate the layer's new placement."""

    layer: int
    # int32, the physical slots to write; each was a target of a `StageExperts` for this layer since the last `PlaceExperts`
    slots: bytes
    physical_to_logical: bytes  # int32, the logical expert in each physical slot from now on


class ConnectExperts(msgspec.Struct, frozen=True, array_like=True, tag="connect_experts"):
    """Connect to the expert processes of this `--expert-mesh` at this `--afd-address`.

    Later steps send their rows there. If one attention process cannot connect, all keep the current expert processes.
    """

    expert_mesh: str
    afd_address: str


class Custom(msgspec.Struct, frozen=True, array_like=True, tag="custom"):
    """Command of a KV connector (`--page-source`), for the executor part that registered the connector's name."""

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
    """Return a command as MessagePack."""
    return _encoder.encode(command)


def decode(data: bytes) -> Command:
    """Invert `encode`. Raise `msgspec.ValidationError` if the bytes are not a command."""
    return _decoder.decode(data)


def int32s(values: Iterable[int]) -> bytes:
    """Return integers as little-endian int32 bytes."""
    return array("i", values).tobytes()  # JAX runs only on little-endian machines


def names_of(data: bytes) -> list[bytes]:
    """Split concatenated page names."""
    return [data[at : at + NAME_BYTES] for at in range(0, len(data), NAME_BYTES)]


def from_int32s(data: bytes) -> array:
    """Invert `int32s`."""
    return array("i", data)
