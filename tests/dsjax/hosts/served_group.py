"""`dsjax serve` as a group of two processes on this machine, and what a client and an administrator ask of it."""

import re

import httpx
from processes import Group
from quick_compilation import FEW_SHAPES

SIZES = {name: value for name, value in FEW_SHAPES.items() if name != "kernels"} | {"max_model_len": 64}
PROMPTS = ["the queue", "def main(", "a b c d e f", "x"]
KEY = {"Authorization": "Bearer admin"}


class ServedGroup:
    """The two processes. options: of both, with underscores; more: those of `Group`."""

    def __init__(self, options: dict, **more):
        options = {"served_model_name": "tiny", "port": 0, "admin_api_key": "admin"} | options
        flags = []
        for name, value in options.items():
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        self.group = Group(["-m", "dsjax.serve", *flags], 2, **more)

    def wait_until_ready(self) -> None:
        self.group.wait_for(0, "serving tiny at", 300)
        self.url = re.search(r"serving tiny at (http://[\d.:]+)", self.group.output[0]).group(1)

    def complete(self, **body) -> httpx.Response:
        body = {"model": "tiny", "max_tokens": 6, "temperature": 0, **body}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=300)

    def post(self, path: str, **body) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, headers=KEY, timeout=300)

    def metric(self, name: str, labels: str = "", url: str = "") -> float:
        """A sample of process 0, or of another. labels: a part of its labels, as they are written."""
        text = httpx.get(f"{url or self.url}/metrics").text
        return float(re.search(rf"^{name}{{.*{labels}.*}} (\S+)$", text, re.MULTILINE).group(1))

    def check_experts_are_counted(self) -> None:
        """Both layers count every token, over four devices."""
        assert self.post("/start_expert_distribution_record").status_code == 200
        self.complete(prompt=PROMPTS)
        found = self.post("/dump_expert_distribution_record").json()
        self.post("/stop_expert_distribution_record")
        sums = [sum(layer) for layer in found["tokens_per_expert"]]
        assert sums[0] == sums[1] > 0
        assert len(found["rows_sent"]) == 4, str(found)[:300]
