"""The processes of a lab: groups that serve, and groups of `LLM` that generate what they are told."""

import contextlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from processes import Group, Processes

from tools.labs.namespaces import Namespaces

MODEL = "tiny"
"""The name that models are served under."""
_SERVING = re.compile(rf"serving {MODEL} at (http://[\d.:]+)")
_ANSWER = "found "
_WORKER = Path(__file__).with_name("worker.py")


def flags_of(options: dict[str, object]) -> list[str]:
    """Options as words of a command line."""
    return [text for name, value in options.items() for text in (f"--{name}", str(value))]


@contextlib.contextmanager
def serving(start: Callable[[Path], Processes], logs: Path | None = None) -> Iterator[tuple[Processes, str]]:
    """Start processes, wait until process 0 serves, and end them.

    Args:
        start: starts them; is given a folder that lasts as long as they do.
        logs: a folder for what each process has printed since it was started last.

    Yields:
        The processes, and the URL of process 0.
    """
    with tempfile.TemporaryDirectory(prefix="dsjax-lab-") as folder:
        processes = start(Path(folder))
        try:
            processes.wait_for(0, f"serving {MODEL} at", 1800)
            yield processes, _SERVING.search(processes.output[0]).group(1)
        except BaseException:
            print(processes.last_words(), file=sys.stderr)
            raise
        finally:
            processes.end()
            if logs is not None:
                logs.mkdir(parents=True, exist_ok=True)
                for index, text in enumerate(processes.output):
                    (logs / f"process-{index}.log").write_text(text)


def group_on(network: Namespaces, command: list[str], **settings) -> Group:
    """A group with one process on each host of a network. command, settings: as of `Group`."""
    return Group(command, network.count, stuck=600, address=network.address(0), before=network.inside, **settings)


def group_serving_on(network: Namespaces, options: list[str]) -> Group:
    """A group of servers with these options, each listening on its host's address."""
    open_to_all = [*options, "--allow-unauthenticated", "--host"]
    own = {host: [*open_to_all, network.address(host)] for host in range(network.count)}
    return group_on(network, ["-m", "dsjax.serve"], options=own)


class Workers:
    """Processes that make one `LLM` together, over hosts of a network or on this one.

    Args:
        options: of `LLM`.
        count: processes.
    """

    def __init__(self, options: dict[str, object], count: int, network: Namespaces | None = None):
        command = [str(_WORKER), json.dumps(options)]
        if network is not None:
            self.processes = group_on(network, command, timeout=600, heartbeat=60)
        elif count > 1:
            self.processes = Group(command, count, stuck=600, timeout=600)
        else:
            self.processes = Processes([[sys.executable, *command]], stuck=600)
        self._answers = 0
        self._answer()

    def generate(self, prompts: list[list[int]], tokens: int) -> dict:
        """Generate so many tokens for each prompt, greedy.

        Returns:
            `tokens` of each prompt; `seconds` of each step; `sent`, the bytes that had left process 0's host after each.
        """
        self.processes.write(0, json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        return self._answer()

    def _answer(self) -> dict:
        self._answers += 1
        self.processes.wait_for(0, f"\n{_ANSWER}", 1800, times=self._answers)
        return json.loads(self.processes.output[0].rpartition(f"\n{_ANSWER}")[2].partition("\n")[0])

    def finish(self) -> None:
        """Let them end by themselves.

        Raises:
            RuntimeError: one of them ended with a code that is not 0.
        """
        self.processes.processes[0].stdin.close()
        codes = self.processes.codes(120)
        if any(codes):
            raise RuntimeError(f"the processes ended with {codes}:\n{self.processes.last_words()}")

    def end(self) -> None:
        """End them at once."""
        self.processes.end()
