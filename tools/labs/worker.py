"""A process of a group of `LLM`, started by `servers.py`. Process 0 reads lines of JSON, generates, and prints the answers."""

import argparse
import json
import logging
import sys
import time
from pathlib import Path

from dsjax import LLM, SamplingParams

_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
"""Has the bytes that left this network namespace."""


def main() -> None:
    """Load, then answer until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("options", type=json.loads, help="of LLM, as JSON")
    parser.add_argument("--coordinator-address")
    for name in ("--num-processes", "--process-id", "--start-timeout", "--heartbeat-timeout"):
        parser.add_argument(name, type=int)
    args = vars(parser.parse_args())
    options = args.pop("options")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    llm = LLM(**options, **{name: value for name, value in args.items() if value is not None})
    print("\nfound {}", flush=True)
    for line in sys.stdin:
        print("\nfound", json.dumps(answer(llm, **json.loads(line))), flush=True)
    llm.shutdown()


def answer(llm: LLM, prompts: list[list[int]], tokens: int) -> dict:
    """Generate; the tokens, and of each step its seconds and the bytes that had left the host after it."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(prompts):
        llm.engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
    found: dict[str, list[int]] = {}
    seconds, sent = [], []
    while llm.engine.has_unfinished():
        began = time.perf_counter()
        outputs = llm.engine.step()
        seconds.append(time.perf_counter() - began)
        sent.append(int(_SENT.read_text()) if _SENT.exists() else 0)
        found |= {one.request_id: list(one.outputs[0].token_ids) for one in outputs if one.finished}
    return {"tokens": [found[str(index)] for index in range(len(prompts))], "seconds": seconds, "sent": sent}


if __name__ == "__main__":
    main()
