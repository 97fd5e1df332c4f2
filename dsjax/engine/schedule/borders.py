"""Borders: where a request can go on from cached pages of a model with window pages. Plain Python.

A border is the end of a page. To go on there a request needs the pages before it, and the window page of the last of them: each layer's
window rests on the one below, so that recomputing a window of tokens is not exact. Which window pages are kept (`kept`) and where cached
tokens are used (`usable`) are two sides of one rule. A model without window pages can go on at the end of every page.
"""

from collections.abc import Container, Sequence

from dsjax.engine.schedule.pages import PagePool, window_name
from dsjax.engine.schedule.request import Request
from dsjax.model.cache_groups import HELD_WINDOWS


def window_columns(tokens: int, page_size: int) -> int:
    """How many pages at most have a part of `tokens` tokens and of the `page_size - 1` before them."""
    return (tokens + 2 * page_size - 3) // page_size + 1


def usable(
    pool: PagePool, names: Sequence[bytes], cached: int, loads: Container[bytes] = (), promised: Container[bytes] = ()
) -> int:
    """How many of the first `cached` pages a request can go on from: up to the last border whose window page is there.

    loads: pages that can be loaded. promised: pages that requests are about to compute, with the window page beside each.
    """
    if not pool.num_windows:
        return cached
    for border in range(cached, 0, -1):
        name = names[border - 1]
        if name in promised or (window := window_name(name)) in pool or window in loads:
            return border
    return 0


def kept(request: Request, page_size: int) -> tuple[int, int]:
    """The borders, in pages, that others are likely to go on from.

    The last one before the prompt's last token, where the same prompt is sent again; and where this request found pages without window
    page: what two requests have begun with, a third may. Where a request has gone on, and where it ends or is preempted, is kept, too.
    """
    return (request.num_prompt_tokens - 1) // page_size, request.missed_border


def held_windows(rows: int, tokens: int, page_size: int, num_drafts: int) -> int:
    """The most window pages that requests hold at a time, and the one that nobody gets.

    rows: running requests, each with drafts of two steps and the page that it may end at. tokens: of prompts, in all steps under way.
    """
    return 1 + rows * (HELD_WINDOWS + 3 * num_drafts // page_size) + -(-tokens // page_size)
