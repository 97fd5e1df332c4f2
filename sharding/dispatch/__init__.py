"""Expert dispatch: sending tokens to the ranks of their experts, and the weighted return."""

from sharding.dispatch.config import DispatchConfig, default_capacity
from sharding.dispatch.entry import dispatch

__all__ = ["DispatchConfig", "default_capacity", "dispatch"]
