"""What can go wrong between two processes."""

from dsjax.errors import UserError


class PeerLostError(ConnectionError):
    """The other process has gone, hangs, or cannot be reached."""


class NotAMemberError(UserError):
    """What answers at an address does not belong to this deployment: it has another cluster key, or is no dsjax process."""


class RefusedError(UserError):
    """The other process belongs to the deployment, and says why it does not do what it was asked for."""
