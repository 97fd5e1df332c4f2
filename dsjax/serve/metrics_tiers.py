"""`TierMetrics`: what the cache and the tiers below it hold, what was found in each, and how long it took to come."""

from collections.abc import Callable, Iterable, Sequence

from dsjax.engine.schedule.rank import RankLoad
from dsjax.engine.tiers.disk_tier import DiskCounts
from dsjax.engine.transfer.remote_prefill import TransferCounts
from dsjax.serve.metrics_families import Gauge, Histogram, Labels, Registry, Total

FETCH_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class TierMetrics:
    """Gauges and counters are read from the loads and the disk's counts at the scrape.

    Args:
        ranks: labels (model_name, engine) of each DP rank.
        loads: gives the ranks' loads.
        page_bytes: of a page of the cache, on all devices of a DP rank.
    """

    def __init__(
        self, registry: Registry, ranks: Sequence[Labels], loads: Callable[[], Sequence[RankLoad]], page_bytes: int
    ):
        self._registry, self._ranks, self._loads, self._page_bytes = registry, ranks, loads, page_bytes
        self._model = ranks[0][0]
        self._disk: DiskCounts | None = None
        self._add_hits()
        self._add_bytes()
        self._add_host()
        self._add_disk()
        self._transfers: TransferCounts | None = None
        self._add_transfers()
        self._waits = Histogram(
            registry,
            "dsjax_cache_fetch_seconds",
            "Time that a request waited for pages of a tier.",
            ("model_name", "tier"),
            FETCH_SECONDS,
        )

    def enter(
        self,
        disk: DiskCounts | None,
        waits: Iterable[tuple[str, float]] = (),
        transfers: TransferCounts | None = None,
    ) -> None:
        """Show these counts from now on, and enter what requests have waited for pages: (tier, seconds)."""
        self._disk, self._transfers = disk, transfers or self._transfers
        for tier, seconds in waits:
            self._waits.observe((self._model, tier), seconds)

    def _add_hits(self) -> None:
        def by_tier() -> Iterable[tuple[Labels, float]]:
            for load in self._loads():
                for tier in ("device", "host", "disk"):
                    yield (*self._ranks[load.rank], tier), load.hits.get(tier, 0)

        def below(value: Callable[[RankLoad], int]) -> Callable[[], Iterable[tuple[Labels, float]]]:
            return lambda: [
                (self._ranks[load.rank], value(load))
                for load in self._loads()
                if "host" in load.tiers or self._disk is not None
            ]

        labels, name = ("model_name", "engine"), "vllm:external_prefix_cache"
        Total(
            self._registry,
            "dsjax_prefix_cache_hits",
            "Tokens of prompts that were found cached, by the tier that had them.",
            (*labels, "tier"),
            by_tier,
        )
        Total(
            self._registry,
            f"{name}_queries",
            "Tokens of prompts that the devices' cache did not have, so that the tiers below were asked.",
            labels,
            below(lambda load: load.queried - load.hits["device"]),
        )
        Total(
            self._registry,
            f"{name}_hits",
            "Those that a tier below had.",
            labels,
            below(lambda load: sum(load.hits.values()) - load.hits["device"]),
        )

    def _add_bytes(self) -> None:
        def read(of: Callable[[RankLoad], tuple[int, int]], disk: str) -> Callable[[], Iterable[tuple[Labels, float]]]:
            def samples() -> Iterable[tuple[Labels, float]]:
                loads = self._loads()
                pages = [of(load) for load in loads]
                yield (self._model, "device"), self._page_bytes * sum(own for own, _ in pages)
                if any("host" in load.tiers for load in loads):
                    yield (self._model, "host"), self._page_bytes * sum(host for _, host in pages)
                if self._disk is not None:
                    yield (self._model, "disk"), self._disk.page_bytes * getattr(self._disk, disk)

            return samples

        name, labels = "dsjax_cache_tier", ("model_name", "tier")
        Gauge(
            self._registry,
            f"{name}_bytes",
            "Bytes of pages that hold tokens, of all ranks.",
            labels,
            read(
                lambda load: (
                    load.used_pages + load.cached_pages,
                    load.tiers["host"].used_pages if "host" in load.tiers else 0,
                ),
                "used_pages",
            ),
        )
        Gauge(
            self._registry,
            f"{name}_limit_bytes",
            "Bytes of pages that there is room for.",
            labels,
            read(
                lambda load: (load.usable_pages, load.tiers["host"].usable_pages if "host" in load.tiers else 0),
                "usable_pages",
            ),
        )

    def _add_host(self) -> None:
        def read(field: str) -> Callable[[], Iterable[tuple[Labels, float]]]:
            return lambda: [
                (self._ranks[load.rank], getattr(load.tiers["host"], field))
                for load in self._loads()
                if "host" in load.tiers
            ]

        name, labels = "dsjax_rank_host_pages", ("model_name", "engine")
        Gauge(self._registry, name, "Pages that host memory has room for.", labels, read("usable_pages"))
        Gauge(self._registry, f"{name}_used", "Pages in host memory.", labels, read("used_pages"))
        for what, documentation in (
            ("stored", "Pages that went from the device to host memory."),
            ("fetched", "Pages that came back from there."),
            ("evicted", "Pages that were dropped there because others needed the room."),
        ):
            Total(self._registry, f"{name}_{what}", documentation, labels, read(what))

    def _add_transfers(self) -> None:
        def read(field: str) -> Callable[[], Iterable[tuple[Labels, float]]]:
            return lambda: [] if self._transfers is None else [((self._model,), getattr(self._transfers, field))]

        def ended() -> Iterable[tuple[Labels, float]]:
            if self._transfers is not None:
                for outcome in ("completed", "given_up"):
                    yield (self._model, outcome), getattr(self._transfers, outcome)

        name, labels = "dsjax_transfer", ("model_name",)
        Gauge(
            self._registry, f"{name}s_under_way", "Prompts that prefill engines compute now.", labels, read("under_way")
        )
        Total(self._registry, f"{name}_pages", "Pages that came from prefill engines.", labels, read("pages"))
        landed = read("landed")
        Gauge(
            self._registry,
            f"{name}_landed_bytes",
            "Of pages from prefill engines that lie on the devices and are not in the cache yet.",
            labels,
            lambda: [(own, pages * self._page_bytes) for own, pages in landed()],
        )
        Total(
            self._registry,
            f"{name}s",
            "Prompts that prefill engines were asked for: all pages came, or the rest was computed here.",
            ("model_name", "outcome"),
            ended,
        )

    def _add_disk(self) -> None:
        def read(field: str) -> Callable[[], Iterable[tuple[Labels, float]]]:
            return lambda: [] if self._disk is None else [((self._model,), getattr(self._disk, field))]

        name, labels = "dsjax_disk_pages", ("model_name",)
        Gauge(self._registry, name, "Pages that the disk has room for.", labels, read("usable_pages"))
        Gauge(self._registry, f"{name}_used", "Pages on the disk.", labels, read("used_pages"))
        Gauge(self._registry, f"{name}_writing", "Pages on their way to the disk.", labels, read("writing"))
        for what, documentation in (
            ("stored", "Pages that were written to the disk."),
            ("fetched", "Pages that came back from there."),
            ("evicted", "Pages that were deleted there because others needed the room."),
            ("not_written", "Pages that were not written, because the disk was too slow or had failed."),
        ):
            Total(self._registry, f"{name}_{what}", documentation, labels, read(what))

        def failures() -> Iterable[tuple[Labels, float]]:
            if self._disk is not None:
                for operation, count in (
                    ("read", self._disk.failed_reads),
                    ("write", self._disk.failed_writes),
                    ("late", self._disk.late),
                ):
                    yield (self._model, operation), count

        Total(
            self._registry,
            "dsjax_disk_failures",
            "Pages that could not be read or written, and requests that went on without pages that were late.",
            ("model_name", "operation"),
            failures,
        )


def add_load_metrics(registry: Registry, ranks: Sequence[Labels], loads: Callable[[], Sequence[RankLoad]]) -> None:
    """Add gauges of what each DP rank has to do, and of the pages of its cache; read at the scrape."""

    def gauge(name: str, documentation: str, value: Callable[[RankLoad], float]) -> None:
        def read() -> Iterable[tuple[Labels, float]]:
            found = {load.rank: load for load in loads()}
            for rank, labels in enumerate(ranks):
                yield labels, value(found[rank]) if rank in found else 0.0

        Gauge(registry, name, documentation, ("model_name", "engine"), read)

    gauge("vllm:num_requests_running", "Requests that hold a slot and pages.", lambda load: load.running)
    gauge("vllm:num_requests_waiting", "Requests in the queue of a rank.", lambda load: load.waiting)
    gauge(
        "vllm:kv_cache_usage_perc",
        "Share of the latent cache's pages that requests hold; 1 is all.",
        lambda load: load.used_pages / load.usable_pages if load.usable_pages else 0.0,
    )
    gauge("dsjax_rank_waiting_tokens", "Tokens of the requests in the queue.", lambda load: load.waiting_tokens)
    gauge("dsjax_rank_cost", "What the next request would find: routing takes the lowest.", lambda load: load.cost)
    gauge("dsjax_rank_pages", "Pages of the latent cache.", lambda load: load.usable_pages)
    gauge("dsjax_rank_pages_used", "Pages that requests hold.", lambda load: load.used_pages)
    gauge("dsjax_rank_pages_cached", "Pages kept for their prefix alone; evictable.", lambda load: load.cached_pages)
