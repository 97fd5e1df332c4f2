"""A prefill and a decode side, each of two processes, make the tokens of one engine; pages go straight from process to process."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from drafting_checkpoint import write_drafting_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "hosts"))
from processes import free_port
from quick_compilation import QUICK_COMPILATION
from side_process import run

from dsjax import LLM

pytestmark = pytest.mark.slow

OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "prefill_chunk": 16,
    "page_size": 4,
    "max_model_len": 96,
    "dtype": "float32",
    "transfer_timeout": 20,
    "compile_ahead": 0,
}


class Side:
    """The processes of one side, each with one device."""

    def __init__(self, count, **options):
        port = free_port()
        environment = os.environ | {
            "PYTHONPATH": str(Path(__file__).parents[3]),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": " ".join(QUICK_COMPILATION),
        }
        environment.pop("PJRT_NPROC", None)
        self.processes = []
        for index in range(count):
            group = {"coordinator_address": f"127.0.0.1:{port}", "num_processes": count, "process_id": index}
            own = {**OPTIONS, "transfer_host": "127.0.0.1", "heartbeat_timeout": 5, "local_prefill_tokens": 1}
            self.processes.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        str(Path(__file__).with_name("side_process.py")),
                        json.dumps({**own, **group, **options}),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            )

    def answer(self):
        while True:
            line = self.processes[0].stdout.readline()
            assert line, "process 0 has ended"
            if line.startswith("{"):
                return json.loads(line)

    def ask(self, **request):
        self.processes[0].stdin.write(json.dumps(request) + "\n")
        self.processes[0].stdin.flush()
        return self.answer()

    def end(self):
        """Exit codes."""
        self.processes[0].stdin.close()
        return [process.wait(30) for process in self.processes]

    def kill(self):
        for process in self.processes:
            process.kill()
            process.wait()


def test_tokens_are_those_of_one_engine_and_a_process_that_dies_costs_no_request_and_no_page(tmp_path):
    write_drafting_checkpoint(tmp_path)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 290, size=int(rng.integers(20, 70))).tolist() for _ in range(6)]
    model = {"model": str(tmp_path)}
    prefill = Side(2, mesh="dp=2", disaggregation_mode="prefill", **model)
    decode = Side(2, mesh="tp=2", disaggregation_mode="decode", **model)
    try:
        llm = LLM(str(tmp_path), mesh="dp=1", **OPTIONS)
        expected = run(llm, [(str(index), tokens, None) for index, tokens in enumerate(prompts)])
        llm.shutdown()
        prefill.answer(), decode.answer()

        def generate():
            said = [[str(index), tokens, prefill.ask(tokens=tokens)] for index, tokens in enumerate(prompts)]
            return decode.ask(requests=said)["found"]

        # Each prefill process keeps the parcels of its rank, and each decode process pulls its copy of them.
        assert generate() == expected
        counts = decode.ask()
        assert (counts["completed"], counts["given_up"], counts["used"]) == (6, 0, 0)
        kept = {}
        for _ in range(100):
            kept = prefill.ask()
            if kept["jobs"] == kept["parcels"] == kept["pages"] == 0:
                break
            time.sleep(0.05)
        assert (kept["jobs"], kept["parcels"], kept["pages"]) == (0, 0, 0)

        # A process of the prefill side dies: the other one goes on alone.
        prefill.processes[1].kill()
        assert generate() == expected
        assert generate() == expected
        after = decode.ask()
        assert after["used"] == after["under_way"] == 0
        assert after["completed"] >= counts["completed"] + 6
        assert decode.end() == [0, 0]
    finally:
        prefill.kill()
        decode.kill()
