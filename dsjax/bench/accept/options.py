"""The options of `dsjax accept` beside those of the server, which are `dsjax bench serve`'s."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dsjax.options import Checked, OptionError, check_url, option


@dataclass(frozen=True)
class ListOptions(Checked):
    """What is held against the server."""

    criteria: str = option("h20-32", "bundled name (configs/acceptance) or a TOML file")
    only: str | None = option(None, "criteria or measurements, separated by commas; * stands for anything")
    quick: bool = option(False, "the same list with the short durations of the file: five minutes for h20-32")
    show_list: bool = option(
        False, "show what would be measured and how long it takes, then end", flag="--list", switch=True
    )
    results: str = option("acceptance", "folder of the reports; a run that was ended goes on from there")
    fresh: bool = option(False, "measure again what the folder has results of")
    progress: bool = option(True, "show a progress bar")

    def __post_init__(self):
        super().__post_init__()
        if not self.results:
            raise OptionError("--results is '', which names no folder; give one, or . for the current one")


@dataclass(frozen=True)
class TestBedOptions(Checked):
    """What else can be measured.

    Attributes:
        limited_networks: the files of `--limited-network`, by their limits.
    """

    __test__ = False  # pytest takes classes that are called Test… for its own

    limited_networks: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    network: str | None = option(None, "JSON of dsjax bench network on these hosts")
    limited_network: list[str] | None = option(
        None,
        "LIMIT=FILE: such a JSON that was made while the links were limited, such as 20=limited.json of 20 Gbit/s; give it several times",
    )
    hook: list[str] | None = option(
        None, "NAME=COMMAND that makes a fault, and NAME-end=COMMAND; give it several times"
    )
    admin_api_key: str | None = option(
        None, "of a dsjax server: to record experts' load, and for scale: hooks", envvar="DSJAX_ADMIN_API_KEY"
    )
    device_metrics: list[str] | None = option(
        None, "further /metrics with devices' memory: of followers, of a dcgm-exporter; give it several times"
    )
    without_eplb_url: str | None = option(None, "a server like this one without --enable-eplb, to compare with")
    without_eplb_device_metrics: list[str] | None = option(
        None, "/metrics of that server's devices, to compare how busy they are; give it several times"
    )
    dataset_path: str | None = option(
        None, "ShareGPT file for the loads; default: random prompts of the file's lengths"
    )

    def __post_init__(self):
        super().__post_init__()
        if self.without_eplb_url is not None:
            check_url("--without-eplb-url", self.without_eplb_url)
        for url in self.metrics_urls:
            check_url("--device-metrics", url, "http://HOST:PORT/metrics")
        for url in self.without_eplb_device_metrics or ():
            check_url("--without-eplb-device-metrics", url, "http://HOST:PORT/metrics")
        if self.dataset_path is not None and not Path(self.dataset_path).is_file():
            raise OptionError(f"--dataset-path is {self.dataset_path}, which is no file; give a ShareGPT file")
        object.__setattr__(self, "limited_networks", dict(map(_limited, self.limited_network or ())))

    @property
    def metrics_urls(self) -> tuple[str, ...]:
        """Addresses of `--device-metrics`."""
        return tuple(self.device_metrics or ())


def _limited(given: str) -> tuple[str, Mapping[str, Any]]:
    from dsjax.plan.measured_network import read_network

    limit, _, path = given.partition("=")
    if not (limit and path):
        raise OptionError(f"--limited-network is {given!r}, expected LIMIT=FILE such as 20=limited.json")
    return limit, read_network(path, f"--limited-network {limit} of").body
