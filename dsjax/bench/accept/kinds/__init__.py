"""The kinds of measurement that a criteria file can name: a row each, to which a new one is added."""

from dsjax.bench.accept.kinds.balance import BalanceMeasurement
from dsjax.bench.accept.kinds.fault import FaultMeasurement
from dsjax.bench.accept.kinds.kind import Measurement
from dsjax.bench.accept.kinds.link import LinkMeasurement
from dsjax.bench.accept.kinds.load import LoadMeasurement
from dsjax.bench.accept.kinds.server import ServerMeasurement
from dsjax.bench.accept.kinds.ttft import TtftMeasurement

KINDS: dict[str, type[Measurement]] = {
    "server": ServerMeasurement,
    "ttft": TtftMeasurement,
    "load": LoadMeasurement,
    "balance": BalanceMeasurement,
    "fault": FaultMeasurement,
    "link": LinkMeasurement,
}
