"""How many files and connections this process may have open at a time (`ulimit -n`)."""

import logging

from dsjax.errors import UserError

_OF_AN_ENGINE, _OF_A_FRONT_END = 32, 8
"""A server had 24 open before its first client, on one device as on 32, and 4 more for each front end. The rest is for clients."""
FEW = 1024

_log = logging.getLogger(__name__)


def descriptor_limit() -> int | None:
    """Raise the limit as far as the system lets this process, and give it; None where there is none."""
    try:
        import resource
    except ImportError:  # no POSIX system
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return None if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS has a second bound, which is not told
        return soft
    return wanted


def least_descriptors(front_ends: int) -> int:
    """Count what a server needs before its first client."""
    return _OF_AN_ENGINE + _OF_A_FRONT_END * front_ends


def check_descriptors(front_ends: int) -> None:
    """Make sure that a server can have its files and connections open, and warn where few are left for clients.

    front_ends: processes beside the engine's.

    Raises:
        UserError: it could not even start.
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
