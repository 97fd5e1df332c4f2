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

    host_cache_bytes: int = option(
        0, "Host memory for evicted pages of all DP ranks, in bytes; 0: none.", Group.CACHE, least=0
    )
    disk_cache: str | None = advanced(
        None,
        "Directory for KV cache pages on disk, which survive a restart. It must be new, empty or from an earlier run, used by one "
        "server at a time, and writable only by its owner.",
        Group.CACHE,
    )
    disk_cache_bytes: int = advanced(0, "Maximum size of --disk-cache with all models, in bytes.", Group.CACHE, least=0)
    page_source: str | None = advanced(
        None,
        "Python module of a custom KV connector, such as my_package.kept_pages.",
        Group.CACHE,
    )
    kv_events_config: str | dict[str, Any] | None = advanced(
        None,
        """Publish KV cache events in vLLM's format. JSON: '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": """
        """"tcp://127.0.0.1:5557"}'.""",
        Group.CACHE,
        host_only=True,
    )

    @property
    def kv_events(self) -> KvEventsConfig | None:
        """The parsed `kv_events_config`; None if it is not given. Raises the errors of `JsonOption.parse`."""
        if self.kv_events_config is None:
            return None
        from dsjax.engine.tiers.event_publisher import KvEventsConfig  # imports ZeroMQ and the scheduler

        return KvEventsConfig.parse(self.kv_events_config)
