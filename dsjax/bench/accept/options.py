"""Options of `dsjax accept`. Its server options are those of `dsjax bench serve`."""

from dataclasses import dataclass
from pathlib import Path

from dsjax.options import Checked, OptionError, check_url, option


@dataclass(frozen=True)
class ListOptions(Checked):
    """Criteria."""

    criteria: str = option("", "Bundled name (configs/acceptance) or TOML file. This or --recipe is required.")
    recipe: str = option("", "JSON file of dsjax plan recipe, to check its predicted rate, TPOT and TTFT.")
    only: str | None = option(None, "Run only these criteria or measurements, separated by commas; * matches anything.")
    quick: bool = option(False, "Use the short durations of the criteria file: five minutes for h20-32.")
    show_list: bool = option(False, "Print measurements and durations, then exit.", flag="--list", switch=True)
    results: str = option("acceptance", "Folder of the reports. An interrupted run resumes from it.")
    fresh: bool = option(False, "Discard the results in the folder and measure again.")
    progress: bool = option(True, "Show a progress bar.")

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

    network: str | None = option(None, "JSON file of dsjax bench network on these hosts.")
    hook: list[str] | None = option(
        None, "NAME=COMMAND that causes a fault, NAME-end=COMMAND that ends it. Repeatable."
    )
    admin_api_key: str | None = option(
        None, "Admin key of dsjax serve, for expert load and scale: hooks.", envvar="DSJAX_ADMIN_API_KEY"
    )
    device_metrics: list[str] | None = option(
        None, "URL of more /metrics with device memory, such as dcgm-exporter's. Repeatable."
    )
    dataset_path: str | None = option(None, "ShareGPT file for the loads. Default: random prompts.")

    def __post_init__(self):
        super().__post_init__()
        for url in self.device_metrics or ():
            check_url("--device-metrics", url, "http://HOST:PORT/metrics")
        if self.dataset_path is not None and not Path(self.dataset_path).is_file():
            raise OptionError(f"--dataset-path is {self.dataset_path}, which is no file; give a ShareGPT file")
