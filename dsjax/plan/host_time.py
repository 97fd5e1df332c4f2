"""`HostTime`: what a step waits for the host beside what its device does: scheduling, launching, making drafts."""

from __future__ import annotations

from dataclasses import dataclass

from dsjax.plan.figure import Figure, assumed


@dataclass(frozen=True)
class HostTime:
    """Seconds (value, low, high) of a decode step, of a prefill step, and of one pass of the MTP module; why."""

    decode: tuple[float, float, float]
    prefill: tuple[float, float, float]
    pass_of_module: tuple[float, float, float]
    why: str

    def step(self, decode: bool) -> Figure:
        """Seconds of one step."""
        return assumed(*(self.decode if decode else self.prefill), "host", self.why, "s")

    def draft(self) -> Figure:
        """Seconds of one pass of the MTP module: a launch of its own, whose tokens the next one waits for."""
        return assumed(
            *self.pass_of_module, "host, a pass of the MTP module", "a launch of its own and its sampling", "s"
        )


OVERLAPPED = HostTime(
    (0.001, 0.0002, 0.004),
    (0.004, 0.001, 0.015),
    (0.0004, 0.0001, 0.001),
    "scheduling overlaps the device's work; launching and sampling remain",
)
"""The next step is scheduled while the device works on this one (SGLang's overlap scheduler, `dsjax serve`'s asynchronous one)."""

SERIAL = HostTime(
    (0.006, 0.003, 0.010),
    (0.009, 0.004, 0.021),
    (0.0004, 0.0001, 0.001),
    "without overlapped scheduling: about 6 ms a step was published",
)
"""The device waits while the host schedules."""

HOST_TIMES = {"overlapped": OVERLAPPED, "serial": SERIAL}
