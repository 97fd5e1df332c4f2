"""Options of `dsjax accept`. Its server options are those of `dsjax bench serve`."""

from dataclasses import dataclass
from pathlib import Path

from dsjax.options import Checked, OptionError, check_url, option


@dataclass(frozen=True)
class ListOptions(Checked):
    """Criteria."""

    criteria: str = option("", "bundled name (configs/acceptance) or a TOML file; this or --recipe is required")
    recipe: str = option("", "JSON of dsjax plan recipe: its predicted rate, TPOT and TTFT, with their intervals")
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
        if bool(self.criteria) == bool(self.recipe):
            raise OptionError(
                "give --criteria (a TOML file, or a bundled name such as h20-32) or --recipe (JSON of dsjax plan recipe), one of the two"
            )
        if not self.results:
            raise OptionError("--results is '', which names no folder; give one, or . for the current one")


@dataclass(frozen=True)
class TestBedOptions(Checked):
    """Further measurements."""

    __test__ = False  # keeps pytest from collecting a class named Test…

    network: str | None = option(None, "JSON of dsjax bench network on these hosts")
    hook: list[str] | None = option(
        None, "NAME=COMMAND that makes a fault, and NAME-end=COMMAND; give it several times"
    )
    admin_api_key: str | None = option(
        None, "of a dsjax server: to record experts' load, and for scale: hooks", envvar="DSJAX_ADMIN_API_KEY"
    )
    device_metrics: list[str] | None = option(
        None, "further /metrics with devices' memory: of followers, of a dcgm-exporter; give it several times"
    )
    dataset_path: str | None = option(
        None, "ShareGPT file for the loads; default: random prompts of the file's lengths"
    )

    def __post_init__(self):
        super().__post_init__()
        for url in self.device_metrics or ():
            check_url("--device-metrics", url, "http://HOST:PORT/metrics")
        if self.dataset_path is not None and not Path(self.dataset_path).is_file():
            raise OptionError(f"--dataset-path is {self.dataset_path}, which is no file; give a ShareGPT file")
