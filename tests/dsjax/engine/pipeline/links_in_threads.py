"""The links between processes of stages, of processes that are threads of this one."""

import threading
from collections.abc import Sequence
from types import SimpleNamespace

from dsjax.engine.pipeline.process_links import ProcessLinks
from dsjax.hosts.cluster_key import ClusterKey
from dsjax.hosts.credentials import Credentials

CREDENTIALS = Credentials(ClusterKey("k" * 64, "a test", is_local=True))


def links_of(order: Sequence[int]) -> list[ProcessLinks]:
    """The links of each process, in the order of their stages."""
    told, meeting = {}, threading.Barrier(len(order))
    present = [SimpleNamespace(process_id=number, address="127.0.0.1") for number in range(len(order))]

    def group(number):
        def ask(stage, value):
            told[number] = value
            meeting.wait(60)
            return [told[member.process_id] for member in present]

        return SimpleNamespace(
            options=SimpleNamespace(process_id=number, address="127.0.0.1", heartbeat_timeout=10),
            credentials=CREDENTIALS,
            agreement=SimpleNamespace(ask=ask),
            present=present,
            check=lambda error=None: None,
        )

    made = {}
    threads = [
        threading.Thread(target=lambda number=number: made.update({number: ProcessLinks(group(number), order)}))
        for number in order
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [made[number] for number in order]
