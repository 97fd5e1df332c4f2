"""The kinds of measurement that a criteria file can name; a new one is added to `KINDS`."""

from dsjax.bench.accept.kinds.fault import FaultMeasurement
from dsjax.bench.accept.kinds.kind import LinkMeasurement, Measurement, ServerMeasurement
from dsjax.bench.accept.kinds.load import BalanceMeasurement, LoadMeasurement, TtftMeasurement

KINDS: dict[str, type[Measurement]] = {
    kind.KIND: kind
    for kind in (
        ServerMeasurement,
        TtftMeasurement,
        LoadMeasurement,
        BalanceMeasurement,
        FaultMeasurement,
        LinkMeasurement,
    )
}
