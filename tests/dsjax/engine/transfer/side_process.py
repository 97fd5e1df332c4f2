"""A process of a prefill or a decode side, for the one that started it: a request a line, and a line for each answer.

Of a prefill side a request is a prompt, and what decode has to be told comes back. Of a decode side it is several prompts, each with
what prefill said of it, and their tokens come back. A request of nothing gives what the side keeps, and one of a mesh what a decode side
keeps on that mesh. A process that is not the first of its side follows that one, and answers nothing.
"""

import json
import sys

from dsjax import LLM, SamplingParams
from dsjax.background import failure_counts
from dsjax.engine.core import EngineCore
from dsjax.engine.elastic.joining import host_options, join_group
from dsjax.engine.schedule.request import RequestOptions
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.transfer.prefill_links import PrefillLinks

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def main() -> None:
    options = json.loads(sys.argv[1])
    if options["disaggregation_mode"] == "prefill":
        prefill(EngineArgs.from_options(**options))
    else:
        decode(LLM(**options))


def prefill(args: EngineArgs) -> None:
    group = join_group(args, host_options(args))
    from dsjax.engine.disaggregated import load_prefill
    from dsjax.engine.elastic.follower import Follower

    if group is not None and not group.is_leader:
        Follower(group).run_with(args)
        return
    server = load_prefill(args, group)
    tell(address=server.address, space=server.space)
    for line in sys.stdin:
        request, engine = json.loads(line), server.engine
        if "tokens" in request:
            tell(**server.prefill(request["tokens"]))
            continue
        pages = sum(rank.pool.num_used for rank in engine.core.scheduler.ranks)
        kept = {"jobs": engine.num_jobs, "chunks": engine.buffers.num_kept, "pages": pages}
        tell(**kept, sent=engine.buffers.pages_sent, **common(engine.core))
    server.shutdown()


def decode(llm: LLM) -> None:
    tell(mesh=llm.facts.mesh)
    core = llm.engine.core
    for line in sys.stdin:
        request = json.loads(line)
        if "requests" not in request:
            if "mesh" in request:
                llm.scale(request["mesh"])
            counts = core.part(PrefillLinks).source.transfer_counts._asdict()
            used = sum(rank.pool.num_used for rank in core.scheduler.ranks)
            tell(used=used, mesh=llm.facts.mesh, **common(core), **counts)
            continue
        llm.engine.flush_prefix_cache()
        tell(token_ids=run(llm, request["requests"]))
    llm.shutdown()


def common(core: EngineCore) -> dict[str, object]:
    """What both sides keep: how often the mesh has changed, by reason, and background work that has failed.

    A prefill side of one process never changes its mesh.
    """
    changes = {} if core.mesh_changer is None else dict(core.mesh_changer.counts.changes)
    return {"changes": changes, "failures": sum(failure_counts().values())}


def run(llm: LLM, requests: list) -> dict[str, list[int]]:
    """Tokens of (name, prompt, what prefill said)."""
    for name, tokens, said in requests:
        llm.engine.add_request(name, {"prompt_token_ids": tokens}, GREEDY, RequestOptions(prefill=said))
    token_ids = {}
    while llm.engine.has_unfinished():
        for output in llm.engine.step():
            if output.finished:
                token_ids[output.request_id] = list(output.outputs[0].token_ids)
    return token_ids


def tell(**fields) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
