"""The processes of a prefill or a decode side, each of which runs `side_process.py`, for the test that starts them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from processes import free_port
from quick_compilation import QUICK_COMPILATION


class Side:
    """One side. Requests go to its first process.

    Attributes:
        began: what the first process says once it serves; set by `wait`.
    """

    def __init__(self, count: int, **options):
        environment = os.environ | {
            "PYTHONPATH": str(Path(__file__).parents[4]),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": " ".join(QUICK_COMPILATION),
        }
        environment.pop("PJRT_NPROC", None)
        script, address = Path(__file__).with_name("side_process.py"), f"127.0.0.1:{free_port()}"
        self.processes = []
        for index in range(count):
            group = {"coordinator_address": address, "num_processes": count, "process_id": index} if count > 1 else {}
            given = json.dumps({"transfer_host": "127.0.0.1", **group, **options})
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.processes.append(subprocess.Popen([sys.executable, str(script), given], env=environment, **pipes))

    def wait(self) -> "Side":
        self.began = self._answer()
        return self

    def ask(self, **request) -> dict:
        self.processes[0].stdin.write(json.dumps(request) + "\n")
        self.processes[0].stdin.flush()
        return self._answer()

    def is_empty(self) -> bool | dict:
        """Whether a prefill side comes to keep nothing; else what it keeps."""
        for _ in range(1200):
            kept = self.ask()
            if kept["jobs"] == kept["chunks"] == kept["pages"] == 0:
                return True
            time.sleep(0.05)
        return kept

    def end(self) -> list[int]:
        self.processes[0].stdin.close()
        return [process.wait(30) for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def _answer(self) -> dict:
        while not (line := self.processes[0].stdout.readline()).startswith("{"):
            assert line, "the first process has ended"
        return json.loads(line)
