"""A process that computes prompts for the one that started it: a request a line, and what decode has to be told back."""

import json
import sys

from sharding.emulation import emulate_devices


def main() -> None:
    options = json.loads(sys.argv[1])
    emulate_devices(2)
    from dsjax.engine.args import EngineArgs
    from dsjax.engine.disaggregated import load_prefill

    server = load_prefill(EngineArgs.from_options(**options))
    print(json.dumps({"address": server.address}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "tokens" in request:
            print(json.dumps(server.prefill(request["tokens"], room=request.get("room"))), flush=True)
            continue
        engine = server.engine
        pages = sum(rank.pool.num_used for rank in engine.core.scheduler.ranks)
        counts = {
            "jobs": engine.num_jobs,
            "parcels": engine.leases.num_kept,
            "pages": pages,
            "sent": engine.leases.pages_sent,
        }
        print(json.dumps(counts), flush=True)
    server.shutdown()


if __name__ == "__main__":
    main()
