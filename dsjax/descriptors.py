"""Raise and check this process's limit on open files and connections (`ulimit -n`)."""

import logging

from dsjax.errors import UserError

_ENGINE_DESCRIPTORS, _FRONT_END_DESCRIPTORS = 32, 8
"""Before its first client, a server on 1 and on 32 devices had 24 open, and 4 more per front end. The rest is for clients."""
FEW = 1024

_log = logging.getLogger(__name__)


def descriptor_limit() -> int | None:
    """Raise the limit as far as the system allows, up to 65,536. Return the limit, or None if the system has none."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return None if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS has a second bound, which getrlimit does not report
        return soft
    return wanted


def least_descriptors(front_ends: int) -> int:
    """Return the number of descriptors that a server needs before its first client."""
    return _ENGINE_DESCRIPTORS + _FRONT_END_DESCRIPTORS * front_ends


def check_descriptors(front_ends: int) -> None:
    """Check that the limit is enough for a server, and warn if it leaves few connections for clients.

    front_ends: API server processes besides the engine's process.

    Raises:
        UserError: the limit is too low to start the server.
    """
    limit, least = descriptor_limit(), least_descriptors(front_ends)
    if limit is None:
        return
    if limit < least:
        front = f" and {front_ends} front ends" if front_ends else ""
        raise UserError(
            f"this process may have {limit} files and connections open at a time (ulimit -Hn), and a server{front} needs {least}; "
            "raise the limit, or give a smaller --api-server-count"
        )
    if limit < FEW:
        _log.warning(
            "This process may have %d files and connections open at a time (ulimit -Hn): about %d clients can be connected, and "
            "others wait. Raise the limit.",
            limit,
            limit - least,
        )
