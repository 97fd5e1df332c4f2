"""Groups whose processes are threads of a test, over real connections."""

import group_in_threads

from dsjax.hosts.group import HostGroup


def groups(count: int, seconds: int = 240, start: int = 60) -> list[HostGroup]:
    """The groups of so many processes. seconds, start: their heartbeat's and their start's timeout."""
    return group_in_threads.groups(count, seconds, start)
