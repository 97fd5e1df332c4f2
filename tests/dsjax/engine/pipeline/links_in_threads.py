"""The links between processes of stages, of processes that are threads of this one."""

import threading
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from dsjax.engine.pipeline.process_links import ProcessLinks
from dsjax.hosts.rendezvous import JoinRequest
from dsjax.messaging import Credentials, Endpoint
from dsjax.messaging.cluster_key import ClusterKey

CREDENTIALS = Credentials(ClusterKey("k" * 64, "a test", is_local=True))


class Links(ProcessLinks):
    """Ends the endpoint of its process too."""

    def close(self):
        super().close()
        self._group.endpoint.close()


def group_of(number: int, processes: int, agreement: Any) -> SimpleNamespace:
    """What the links of a process know of its group."""
    present = [JoinRequest(each, processes, "host", 10 + each, "127.0.0.1", "m") for each in range(processes)]
    return SimpleNamespace(
        options=SimpleNamespace(process_id=number, address="127.0.0.1", heartbeat_timeout=10),
        endpoint=Endpoint("127.0.0.1", CREDENTIALS),
        agreement=agreement,
        present=present,
        check=lambda error=None: None,
    )


class Agreement:
    """What processes that are threads say to each other's questions, each in its order."""

    def __init__(self, number: int, processes: int, told: dict, changed: threading.Condition):
        self._number, self._processes, self._told, self._changed = number, processes, told, changed
        self._questions = Counter()

    def tell(self, stage: str, value: Any = None) -> dict[int, Any]:
        with self._changed:
            said = self._told.setdefault((stage, self._questions[stage]), {})
            said[self._number] = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
            self._questions[stage] += 1
            self._changed.notify_all()
        return said

    def ask(self, stage: str, value: Any = None) -> list[Any]:
        said = self.tell(stage, value)
        with self._changed:
            assert self._changed.wait_for(lambda: len(said) == self._processes, 60)
        return [said[number] for number in range(self._processes)]


def links_of(order: Sequence[int]) -> list[ProcessLinks]:
    """The links of each process, in the order of their stages."""
    made, told, changed = {}, {}, threading.Condition()

    def make(number):
        group = group_of(number, len(order), Agreement(number, len(order), told, changed))
        made[number] = Links(group, order)

    threads = [threading.Thread(target=make, args=(number,)) for number in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [made[number] for number in order]
