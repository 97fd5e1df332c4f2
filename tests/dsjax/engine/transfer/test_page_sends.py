"""`PageSends`: pages into chunks, of which a rank keeps a number that its memory has room for."""

from types import SimpleNamespace

from dsjax.engine.transfer.messages import CHUNK_PAGES, MOST_KEPT
from dsjax.engine.transfer.page_sends import PageSends
from dsjax.engine.transfer.send_buffers import Keeper, PageSend, SendBuffers

MOST_CHUNKS = MOST_KEPT // CHUNK_PAGES


class Prompt:
    """As much of a request as is sent."""

    def __init__(self, pages):
        self.pages, self.page_hashes = list(range(pages)), [bytes(32)] * pages
        self.num_computed_tokens = self.num_sealed_pages = 0


class Sender:
    """One rank that sends whatever is sealed."""

    def __init__(self):
        self.buffers = SendBuffers([Keeper()], 30, lambda send, offer: None, lambda: 0.0)
        self.source, self.held = PageSends(self.buffers), []
        pool = SimpleNamespace(hold=self.held.extend, release=lambda pages: [self.held.remove(page) for page in pages])
        self.source.bind([SimpleNamespace(pool=pool)])

    def send(self, name, pages):
        prompt = Prompt(pages)
        self.source.begin(PageSend(name, prompt, None, 0, 0, pages))
        return prompt

    def seal(self, prompt, pages):
        prompt.num_sealed_pages = pages
        self.source.sealed(0, prompt)

    def chunks(self):
        return [
            (buffer.send.transfer, buffer.offer.first, buffer.offer.count) for buffer in self.buffers._buffers.values()
        ]


def test_a_chunk_counts_as_a_whole_one_however_few_pages_it_has():
    rank = Sender()
    for number in range(MOST_CHUNKS + 4):
        rank.seal(rank.send(f"{number}", 2), 2)
    rank.source.begin_rank(0, 0.0)
    assert rank.chunks() == [(f"{number}", 0, 2) for number in range(MOST_CHUNKS)]
    assert rank.buffers.num_pages_kept == 2 * MOST_CHUNKS
    assert not rank.source.has_work()
    rank.buffers.release(1)
    assert rank.source.has_work()
    rank.source.begin_rank(0, 0.0)
    assert rank.chunks()[-1] == (f"{MOST_CHUNKS}", 0, 2)
    assert len(rank.held) == 3 * 2


def test_pages_that_found_no_room_go_into_one_chunk_with_those_that_follow():
    rank = Sender()
    for number in range(MOST_CHUNKS):
        rank.seal(rank.send(f"{number}", 1), 1)
    rank.source.begin_rank(0, 0.0)
    prompt = rank.send("late", CHUNK_PAGES + 3)
    for pages in (2, 5, CHUNK_PAGES + 3):
        rank.seal(prompt, pages)
        rank.source.begin_rank(0, 0.0)
    for number in (1, 2):
        rank.buffers.release(number)
    rank.source.begin_rank(0, 0.0)
    assert rank.chunks()[-2:] == [("late", 0, CHUNK_PAGES), ("late", CHUNK_PAGES, 3)]
    assert not rank.held
