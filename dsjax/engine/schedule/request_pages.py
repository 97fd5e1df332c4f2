"""`RequestPages`: the pages of one DP rank's running requests: which cached ones they start with, which they fill and release."""

from typing import NamedTuple

from dsjax.engine.schedule.page_loads import PageLoads
from dsjax.engine.schedule.pages import PagePool, extend_hashes, window_name
from dsjax.engine.schedule.request import Request
from dsjax.engine.schedule.scheduler_config import SchedulerConfig


class StartPages(NamedTuple):
    """Pages with which a waiting request can start."""

    cached: list[int]  # pages of its prefix
    copied: list[int]  # the cached page that its last token fills, copied before that token is recomputed; or empty
    window_names: list[bytes]  # name of the window page at the end of `cached`; or empty
    shared_windows: list[int]  # that window page if it is cached; or empty
    num_remaining: int  # tokens to compute
    num_pages: int  # number of pages to allocate
    num_windows: int  # number of window pages to allocate


class RequestPages:
    """Gives pages of a rank to its requests.

    Attributes:
        to_clear: released pages that may hold non-finite values. The reader clears the pages and then the list.
    """

    def __init__(self, pool: PagePool, config: SchedulerConfig, loads: PageLoads):
        self.pool, self.config, self.loads = pool, config, loads
        self.to_clear: list[int] = []

    def readable_names(self, request: Request) -> list[bytes]:
        """Return the hashes of the pages that a request may read from the cache: full ones before its last token, which is computed."""
        if not self.config.prefix_caching or request.wants_prompt_logprobs:
            return []
        page_size = self.pool.page_size
        return extend_hashes(request, page_size)[: (len(request.token_ids) - 1) // page_size]

    def plan_start(self, request: Request, names: list[bytes], cached: list[int], budget: int) -> StartPages:
        """Return the pages with which a request can start. names: of the pages that it may read, of which the first are `cached`."""
        border = self.pool.usable(names, len(cached))
        request.missed_window_border = len(cached) if border < len(cached) else 0
        cached = cached[:border]
        window_names = [window_name(names[border - 1])] if border and self.pool.num_windows else []
        copied = self._last_page(request) if len(cached) == len(names) else []
        num_remaining = 1 if copied else len(request.token_ids) - len(cached) * self.pool.page_size
        num_windows = 0
        if self.pool.num_windows:
            num_windows = self.pool.pages_for(min(num_remaining, self.config.prefill_chunk, budget))
        return StartPages(
            cached,
            copied,
            window_names,
            self.pool.find(window_names),
            num_remaining,
            self.pool.pages_for(len(request.token_ids)) - len(cached),
            num_windows,
        )

    def _last_page(self, request: Request) -> list[int]:
        """Return a list with the cached page that the request's last token fills, or an empty list. The token is recomputed in a copy.

        Always empty with window pages, because they do not keep the state before their last token.
        """
        page_size = self.pool.page_size
        if (
            len(request.token_ids) % page_size
            or self.pool.num_windows
            or not self.config.prefix_caching
            or request.wants_prompt_logprobs
        ):
            return []
        return self.pool.find(extend_hashes(request, page_size)[-1:])

    def take_start(self, request: Request, start: StartPages) -> None:
        """Give a waiting request these pages. The last new page is for a copy of the `copied` page, if any."""
        for name in start.window_names:  # another request may have the same prefix
            self.pool.keep(name)
        cached, copied = start.cached, start.copied
        self.pool.hold(start.shared_windows)
        request.window_pages = start.shared_windows + self.pool.allocate(start.num_windows, windows=True)
        request.first_window = len(cached) - len(start.shared_windows)
        self.pool.hold(cached)
        # Held only so that `allocate` does not take it. The copy runs before everything planned later.
        self.pool.hold(copied)
        request.pages = cached + self.pool.allocate(start.num_pages)
        self.pool.release(copied)
        request.num_sealed_pages = len(cached)
        request.num_computed_tokens = len(request.token_ids) - 1 if copied else len(cached) * self.pool.page_size

    def num_missing_windows(self, request: Request, end: int) -> int:
        """Return how many window pages a request lacks for its pages up to number `end` (exclusive)."""
        return max(0, end - request.num_writable_pages) if self.pool.num_windows else 0

    def grow_for_drafts(self, request: Request, num_tokens: int) -> None:
        """Allocate pages for drafts if they are free. No request is preempted for drafts."""
        end = self.pool.pages_for(min(num_tokens, request.max_cached_tokens))
        num_missing = end - len(request.pages)
        if 0 < num_missing <= self.pool.num_free:
            request.pages += self.pool.allocate(num_missing)
        if windows := self.num_missing_windows(request, min(end, len(request.pages))):
            self.seal(request)
            request.window_pages += self.pool.allocate(min(windows, self.pool.num_free_windows), windows=True)

    def seal(self, request: Request) -> None:
        """Add the full, computed pages to the prefix cache, and release the window pages that no later row reads.

        Their values are finite: a request with non-finite values would have failed.
        """
        # Accepted drafts may reach beyond the token that ended the request.
        computed = min(request.num_computed_tokens, len(request.token_ids))
        page_size, sealed = self.pool.page_size, request.num_sealed_pages
        full = computed // page_size
        if full > sealed and self.config.prefix_caching:
            names, borders = extend_hashes(request, page_size), _kept_window_borders(request, page_size)
            self.pool.seal_of(request, sealed, request.pages[sealed:full])
            if request.window_pages:
                for index in range(sealed, full):
                    name = window_name(names[index])
                    self.pool.seal(request.window_pages[index - request.first_window], name)
                    if index + 1 in borders:
                        self.pool.keep(name)
            request.num_sealed_pages = full
            self.loads.sealed(request)
        num_passed = full - 1 - request.first_window
        if num_passed > 0 and request.window_pages:
            self.pool.release(request.window_pages[:num_passed])
            del request.window_pages[:num_passed]
            request.first_window += num_passed

    def invalidate(self, request: Request) -> None:
        """Drop all pages of a request with non-finite values from the prefix cache, even shared ones, so that no other request fails."""
        request.num_clean_pages = request.num_sealed_pages
        pages = request.pages + request.window_pages
        self.loads.forget(self.pool.names_of(pages))
        self.pool.forget(pages)
        request.num_sealed_pages = len(request.pages)  # so that `seal` skips them

    def release(self, request: Request) -> None:
        """Release all pages of a request."""
        if request.num_clean_pages is not None:
            self.to_clear += request.pages[request.num_clean_pages :]
            self.to_clear += request.window_pages[max(0, request.num_clean_pages - request.first_window) :]
        for name in request.page_hashes[request.num_sealed_pages - 1 : request.num_sealed_pages]:
            self.pool.keep(window_name(name))
        self.pool.release(request.pages)
        self.pool.release(request.window_pages)
        request.pages, request.window_pages, request.first_window = [], [], 0
        request.num_sealed_pages = 0


def _kept_window_borders(request: Request, page_size: int) -> tuple[int, int]:
    """Return the borders (ends of pages, in pages) whose window page is kept because other requests are likely to continue there.

    The first is the last border before the prompt's last token, for a repetition of the prompt. The second is where this request found
    cached pages but no window page: two requests share this prefix, so a third may too. Other code keeps the window pages where a request
    continued, ended or was preempted.
    """
    return (request.num_prompt_tokens - 1) // page_size, request.missed_window_border
