"""`Comers`: processes that come back to a group under the id of one that is gone, as process 0 lets them in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsjax.background import start_thread
from dsjax.hosts.rendezvous import JoinRequest

if TYPE_CHECKING:
    from dsjax.hosts.group import HostGroup

_LOOK_SECONDS = 1.0
_JOIN_SECONDS = 30.0


class Comers:
    """Both ends of a return: what one that comes says when it is prepared, and how process 0 waits for it.

    A process is *let in* by the rendezvous's listener, joins JAX's coordination service, and compiles ahead. Then it is a member.
    """

    def __init__(self, group: HostGroup):
        self._group = group
        self._let_in: set[JoinRequest] = set()  # and not members yet; under the lock of `group.seen`

    def say_prepared(self) -> None:
        """Say, as a process that comes back, that this one can be in the next generation without keeping the others waiting."""
        self._group.store.set(_prepared_key(self._group.me), b"1")

    @property
    def ids(self) -> set[int]:
        """Process 0's: the ids of those that are let in. They may not be alive before they have joined."""
        with self._group.seen:
            return {request.process_id for request in self._let_in}

    def let_in(self, request: JoinRequest) -> int | None:
        """Wait until the coordination service has forgotten the process that had this id; then it may be joined.

        Give the first generation that it may be in; None where the group ends. It is called in a thread of the listener.
        """
        group = self._group
        with group.seen:
            self._let_in.add(request)
            group.seen.wait_for(lambda: request.process_id in group.unseen or group.leaving)
        if group.leaving:
            return None
        refuse = lambda error: self._refuse(request)  # noqa: E731
        start_thread("welcome", self._welcome, request, name="dsjax-welcome", on_failure=refuse)
        return group.generation + 1

    def forget(self, request: JoinRequest) -> None:
        """Take notice that its connection has ended."""
        with self._group.seen:
            self._let_in.discard(request)
            self._group.seen.notify_all()

    def _refuse(self, request: JoinRequest) -> None:
        """Have a process that could not be welcomed come again, and let those that come with it go on."""
        self.forget(request)
        self._group.drop(request.process_id)
        self._say_changed()

    def _welcome(self, request: JoinRequest) -> None:
        """Wait until a process that comes back has joined, and has its programs. The mesh changes once for several that come together."""
        group = self._group
        patience = 2 * group.options.heartbeat_timeout + _JOIN_SECONDS
        with group.seen:
            joined = group.seen.wait_for(
                lambda: request.process_id not in group.unseen or group.leaving or request not in self._let_in,
                timeout=patience,
            )
            joined = joined and request in self._let_in
        joined = joined and self._is_prepared(request)
        with group.seen:
            self._let_in.discard(request)
            if joined and not group.leaving:
                group.replace(request)
        self._say_changed()

    def _is_prepared(self, request: JoinRequest) -> bool:
        """Wait until a process that has joined says so, for as long as it lives: compilation may take its time. False: it is gone again."""
        group, key = self._group, _prepared_key(request)
        while not group.leaving and request.process_id not in group.unseen:
            try:
                if group.store.get(key, _LOOK_SECONDS) is not None:
                    group.store.delete(key)
                    return group.is_connected(request)
            except ConnectionError:
                return False
            if not group.is_connected(request):
                return False
        return False

    def _say_changed(self) -> None:
        """Have the engine look at its processes, where nobody else is about to come."""
        with self._group.seen:
            others = bool(self._let_in)
        if self._group.on_change is not None and not self._group.leaving and not others:
            self._group.on_change(None)


def _prepared_key(member: JoinRequest) -> str:
    return f"dsjax/prepared/{member.identity}"
