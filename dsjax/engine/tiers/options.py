"""`TierOptions`: where pages of the prefix cache go when they leave the devices, and who is told; what does not go with it. No JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsjax.engine.tiers.event_publisher import KvEventsConfig
from dsjax.errors import UserError
from dsjax.options import option


@dataclass(frozen=True, kw_only=True)
class TierOptions:
    """Options of an engine that keeps pages beside its devices, or publishes where they are."""

    host_cache_bytes: int = option(
        0,
        "host memory of all DP ranks together that evicted pages of the prefix cache go to, and come back from; 0: none",
        least=0,
    )
    disk_cache: str | None = option(
        None,
        "folder for pages that leave the cache, which survive a restart: empty, or not there yet, or of an earlier run; nobody else may "
        "write in it; one server at a time; with --disk-cache-bytes",
    )
    disk_cache_bytes: int = option(
        0, "most bytes of all pages in that folder, those of earlier runs and other models included", least=0
    )
    page_source: str | None = option(
        None,
        "module of a further page source, such as my_package.kept_pages: a place where pages of the cache exist beside the devices",
    )
    kv_events_config: str | dict[str, Any] | None = option(
        None,
        "publish which pages are stored and removed, as vLLM does: JSON such as "
        '\'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557"}\'; needs pyzmq',
        of_host=True,
    )

    @property
    def kv_events(self) -> KvEventsConfig | None:
        """`kv_events_config`, read; None where it is not given.

        Raises:
            UserError: it is not JSON, or has fields or values that cannot be.
        """
        if self.kv_events_config is None:
            return None
        return KvEventsConfig.parse(self.kv_events_config)


NO_SHARED_DISK = (
    "--disk-cache does not work on a mesh of several processes yet; leave it out, or use --host-cache-bytes"
)
"""Why a folder of pages is refused to several processes: at once where their number is given, else when they have met."""


def check_tiers(args: Any) -> None:
    """Check that the other options go with offload tiers and page events. args: `EngineArgs`, which are checked where they are made.

    Raises:
        UserError: they do not.
    """
    events = args.kv_events
    if events is not None and events.publishes and not args.enable_prefix_caching:
        raise UserError(
            "--kv-events-config tells of the prefix cache's pages, and --no-enable-prefix-caching turns it off; leave one of them out"
        )
    if args.disk_cache is None:
        if args.disk_cache_bytes:
            raise UserError("--disk-cache-bytes is given without --disk-cache; give the folder too")
        return
    if not args.disk_cache_bytes:
        raise UserError("--disk-cache is given without --disk-cache-bytes; say how many bytes the pages in it may take")
    if not args.enable_prefix_caching:
        raise UserError("--disk-cache keeps pages of the prefix cache, which --no-enable-prefix-caching turns off")
    if args.record_steps is not None:
        raise UserError(
            "--record-steps does not go with --disk-cache: a recording would lack what pages from the disk held; leave one of them out"
        )
    if (args.num_processes or 1) > 1:  # a group that a cluster's variables name is found later, and refused then
        raise UserError(NO_SHARED_DISK)
