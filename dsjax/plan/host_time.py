"""What a request waits for the host: scheduling, launching kernels, making drafts, and the way through the server."""

from __future__ import annotations

from dataclasses import dataclass

from dsjax.plan.assumptions import assumption


@dataclass(frozen=True)
class HostTime:
    """Seconds of the host in a step.

    ahead: a step is planned and launched while the one before computes (SGLang's overlap scheduler, `dsjax serve`'s asynchronous one);
    what arrives during a step then waits for the next one too, which was planned without it. Otherwise the device waits meanwhile.
    """

    ahead: bool

    def step(self, decode: bool) -> float:
        """Seconds of one step."""
        return assumption(f"host, {'decode' if decode else 'prefill'}, {'overlapped' if self.ahead else 'serial'}")


OVERLAPPED, SERIAL = HostTime(ahead=True), HostTime(ahead=False)
HOST_TIMES = {"overlapped": OVERLAPPED, "serial": SERIAL}


def front_door() -> float:
    """Seconds of a request on its way to the scheduler and of its first token on the way back."""
    return assumption("front door")
