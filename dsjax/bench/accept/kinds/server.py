"""`ServerMeasurement`: what the server says of itself."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dsjax.bench.accept.kinds.kind import Measured, Measurement

if TYPE_CHECKING:
    from dsjax.bench.accept.test_bed import TestBed


@dataclass(frozen=True, kw_only=True)
class ServerMeasurement(Measurement):
    """The longest request, and the devices, that the server names."""

    UNITS: ClassVar = {"max_model_len": "tokens", "devices": "devices"}

    def expected_seconds(self) -> float:
        """Nothing: the server was asked already."""
        return 0.0

    def depends_on(self, bed: "TestBed") -> tuple[str, ...]:
        """What it says, and `--devices`: both were asked already, and a server may be started anew with others."""
        facts = bed.server.facts
        return tuple(map(str, (facts.max_model_len, bed.server.options.devices or facts.num_devices)))

    async def measure(self, bed: "TestBed") -> Measured:
        """Read the facts."""
        facts, found = bed.server.facts, Measured()
        found.enter("max_model_len", facts.max_model_len, "/v1/models does not say max_model_len")
        devices = bed.server.options.devices or facts.num_devices
        found.enter("devices", devices, "the server has no /server_info; give --devices")
        return found
