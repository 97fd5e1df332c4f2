"""Many processes as one group, over JAX's distributed runtime. Knows nothing of models, engines or HTTP; docs/many-hosts.md."""

from dsjax.hosts.options import GroupOptions, HostOptions

__all__ = ["GroupOptions", "HostOptions"]
