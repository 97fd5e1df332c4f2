"""`TierOptions`: where pages of the prefix cache go when they leave the devices, and who is told. No JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsjax.options import option

if TYPE_CHECKING:
    from dsjax.engine.tiers.event_publisher import KvEventsConfig


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
        '\'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557"}\'',
        of_host=True,
    )

    @property
    def kv_events(self) -> KvEventsConfig | None:
        """`kv_events_config`, read; None where it is not given. Raises as `JsonOption.parse`."""
        if self.kv_events_config is None:
            return None
        from dsjax.engine.tiers.event_publisher import KvEventsConfig  # brings ZeroMQ and the scheduler in

        return KvEventsConfig.parse(self.kv_events_config)
