"""The links between processes of stages, of processes that are threads of this one."""

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

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


def group_of(number: int, processes: int, ask: Callable[[str, Any], list[Any]]) -> SimpleNamespace:
    """What the links of a process know of its group. ask: what all say to a question."""
    present = [JoinRequest(each, processes, "host", 10 + each, "127.0.0.1", "m") for each in range(processes)]
    return SimpleNamespace(
        options=SimpleNamespace(process_id=number, address="127.0.0.1", heartbeat_timeout=10),
        endpoint=Endpoint("127.0.0.1", CREDENTIALS),
        agreement=SimpleNamespace(ask=ask),
        present=present,
        check=lambda error=None: None,
    )


def links_of(order: Sequence[int]) -> list[ProcessLinks]:
    told, meeting = {}, threading.Barrier(len(order))

    def group(number):
        def ask(stage, value):
            told[number] = value
            meeting.wait(60)
            return [told[each] for each in range(len(order))]

        return group_of(number, len(order), ask)

    made = {}
    threads = [
        threading.Thread(target=lambda number=number: made.update({number: Links(group(number), order)}))
        for number in order
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [made[number] for number in order]
