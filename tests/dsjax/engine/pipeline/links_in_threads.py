"""The links between processes of stages, of processes that are threads of this one."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from group_in_threads import groups

from dsjax.engine.pipeline.process_links import ProcessLinks


def links_of(order: Sequence[int]) -> list[ProcessLinks]:
    """The links of each process, in the order of their stages."""
    made = groups(len(order), heartbeat=60)
    for group in made:
        group.check = lambda error=None: None  # who has gone is left to the links to say
    with ThreadPoolExecutor(len(order)) as pool:
        return list(pool.map(lambda number: ProcessLinks(made[number], order), order))
