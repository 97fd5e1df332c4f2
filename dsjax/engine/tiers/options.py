"""`TierOptions`: options of the offload tiers of the prefix cache, and of its events. No JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsjax.options import Group, advanced, option

if TYPE_CHECKING:
    from dsjax.engine.tiers.event_publisher import KvEventsConfig


@dataclass(frozen=True, kw_only=True)
class TierOptions:
    """Options of an engine that keeps pages outside its devices, or publishes cache events."""

    host_cache_bytes: int = option(0, "Host memory for evicted pages, of all DP ranks; 0: none.", Group.CACHE, least=0)
    disk_cache: str | None = advanced(
        None,
        "Folder for pages that leave the cache; they survive a restart. Empty, new, or of an earlier run, for one server at a time, and "
        "writable by nobody else.",
        Group.CACHE,
    )
    disk_cache_bytes: int = advanced(
        0, "Maximum bytes in --disk-cache, including other models' pages.", Group.CACHE, least=0
    )
    page_source: str | None = advanced(
        None,
        "Module of a custom KV connector, such as my_package.kept_pages.",
        Group.CACHE,
    )
    kv_events_config: str | dict[str, Any] | None = advanced(
        None,
        "Publish which pages are stored and removed, as vLLM does: "
        '\'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557"}\'.',
        Group.CACHE,
        of_host=True,
    )

    @property
    def kv_events(self) -> KvEventsConfig | None:
        """The parsed `kv_events_config`; None if it is not given. Raises the errors of `JsonOption.parse`."""
        if self.kv_events_config is None:
            return None
        from dsjax.engine.tiers.event_publisher import KvEventsConfig  # imports ZeroMQ and the scheduler

        return KvEventsConfig.parse(self.kv_events_config)
