"""What a request waits for the host: scheduling, launching kernels, making drafts, and the way through the server."""

from __future__ import annotations

from dataclasses import dataclass

from dsjax.plan.figure import assumed


@dataclass(frozen=True)
class HostTime:
    """Seconds (value, low, high) of a decode step, of a prefill step, and of one pass of the MTP module; why.

    ahead: a step is planned and launched while the one before computes. What arrives during a step then waits for the next one
    too, which was planned without it.
    """

    decode: tuple[float, float, float]
    prefill: tuple[float, float, float]
    pass_of_module: tuple[float, float, float]
    why: str
    ahead: bool

    def step(self, decode: bool) -> float:
        """Seconds of one step."""
        return assumed(*(self.decode if decode else self.prefill), "host", self.why, "s")

    def draft(self) -> float:
        """Seconds of one pass of the MTP module: a launch of its own, whose tokens the next one waits for."""
        return assumed(
            *self.pass_of_module, "host, a pass of the MTP module", "a launch of its own and its sampling", "s"
        )

    def drafting_program(self) -> float:
        """Seconds of one program that makes all drafts of a step; none where it is the step's own."""
        value, _, high = self.pass_of_module
        why = "dsjax's engine makes all drafts in one program, and where each token is the most probable one in the step's own"
        return assumed(value, 0.0, high, "host, the program of the drafts", why, "s")


def step_message() -> float:
    """Seconds until the other processes of a group have read what process 0 has them do in a step.

    It is hidden where the devices compute another step meanwhile, and not where the host takes part in each layer.
    """
    why = "a broadcast by ZeroMQ on one host takes the sender 0.13 ms; the last of 32 readers beside busy Python has it after 2.1 ms"
    return assumed(0.13e-3, 0.1e-3, 2.1e-3, "a step's command to the other processes", why, "s")


OVERLAPPED = HostTime(
    (0.001, 0.0002, 0.004),
    (0.004, 0.001, 0.015),
    (0.0004, 0.0001, 0.001),
    "scheduling overlaps the device's work; launching and sampling remain",
    ahead=True,
)
"""The next step is scheduled while the device works on this one (SGLang's overlap scheduler, `dsjax serve`'s asynchronous one)."""

SERIAL = HostTime(
    (0.006, 0.003, 0.010),
    (0.009, 0.004, 0.021),
    (0.0004, 0.0001, 0.001),
    "without overlapped scheduling: about 6 ms a step was published",
    ahead=False,
)
"""The device waits while the host schedules."""

HOST_TIMES = {"overlapped": OVERLAPPED, "serial": SERIAL}


def eager_layer() -> float:
    """Seconds in which Python starts the kernels of one layer of a prefill step, one by one.

    SGLang's engine logged 82.6 ms for a prefill of one token of DeepSeek-V3, and 23.1 ms with the same kernels in a CUDA graph, which
    is the low end; the pull request speaks of 80 to 100 ms for any prompt below 100 tokens. 61 layers and the host's 4 ms.
    """
    why = "a prefill of one token takes 82.6 ms without a CUDA graph, 23.1 with one (sgl-project/sglang pull request 12160)"
    return assumed(1.29e-3, 0.31e-3, 1.6e-3, "launches of a layer", why, "s")


def captured_layer() -> float:
    """Seconds of starting a layer of a prefill step that is captured in pieces, between which its attention is started.

    The low end of `eager_layer`, whose source has it for a prefill of one token.
    """
    why = (
        "a prefill of one token takes 23.1 ms with its kernels in a CUDA graph (sgl-project/sglang pull request 12160)"
    )
    return assumed(0.31e-3, 0.15e-3, 0.38e-3, "launches of a captured layer", why, "s")


def compiled_layer() -> float:
    """Seconds of launching a layer whose operations one compiled program starts: XLA's, whose thunks are native code."""
    return assumed(150e-6, 90e-6, 250e-6, "launches of a layer", "about 30 at 5 µs, not captured", "s")


def front_door() -> float:
    """Seconds of a request on its way to the scheduler and of its first token on the way back."""
    why = "HTTP, tokenising a prompt, and the hops between the server's processes, there and back; nobody published them apart"
    return assumed(0.010, 0.003, 0.030, "front door", why, "s")
