"""What vLLM's and SGLang's options are called here, for whoever types them by heart."""

from collections.abc import Iterable, Sequence

HERE = {
    "--tensor-parallel-size -tp --tp-size --tp": "--mesh tp=N: devices of an attention replica",
    "--data-parallel-size -dp --dp-size --dp": (
        "--mesh dp=N: N attention replicas; SGLang's have tp-size ÷ dp-size devices each, which is tp here"
    ),
    "--enable-expert-parallel -ep": (
        "--mesh dp=N,tp=N: experts are spread over all devices; with ep=1 each expert is cut over the tp devices"
    ),
    "--ep-size --ep --expert-parallel-size": (
        "--mesh dp=N,ep=N: so many devices together hold each expert once; default: all devices"
    ),
    "--enable-dp-attention": "--mesh dp=N: attention of DP ranks is always apart",
    "--pipeline-parallel-size -pp --pp-size --pp": (
        "--mesh pp=N,tp=N: N stages, of dp × tp devices each; --pp-layer-partition says how many layers each has"
    ),
    "--model-path": "--model",
    "--context-length": "--max-model-len",
    "--max-running-requests": "--max-num-seqs: of a DP rank, not of all",
    "--max-total-tokens --num-gpu-blocks-override": "--cache-tokens: token slots of a DP rank's cache",
    "--block-size": "--page-size",
    "--chunked-prefill-size": (
        "--prefill-chunk: most tokens of one prompt in a step; --max-num-batched-tokens bounds the whole step"
    ),
    "--max-prefill-tokens": "--max-num-batched-tokens",
    "--schedule-policy": "--scheduling-policy",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--disable-overlap-schedule": "--no-async-scheduling",
    "--quantization -q": "--weights fp8",
    "--attention-backend --prefill-attention-backend --decode-attention-backend --moe-runner-backend": "--kernels",
    "--all2all-backend --moe-a2a-backend --deepep-mode": "--dispatch",
    "--ep-num-redundant-experts": "--redundant-experts",
    "--speculative-algorithm --speculative-num-steps --speculative-num-draft-tokens --speculative-eagle-topk": (
        """--speculative-config '{"method": "mtp", "num_speculative_tokens": N}'"""
    ),
    "--enable-hierarchical-cache --hicache-size --hicache-ratio --swap-space --kv-offloading-size": (
        "--host-cache-bytes"
    ),
    "--dist-init-addr --master-addr": "--coordinator-address HOST:PORT",
    "--nnodes": "--num-processes",
    "--node-rank": "--process-id",
    "--random-seed": "--seed",
    "--watchdog-timeout": "--step-timeout",
}
"""From the options of vLLM and SGLang to ours, each followed by what is different. Spaces stand between names of one option."""

NEEDLESS = {
    "--trust-remote-code": "no code of a checkpoint is ever run",
    "--enforce-eager --disable-cuda-graph --cuda-graph-max-bs --enable-torch-compile": (
        "every step is a program compiled before the first request"
    ),
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--enable-metrics": "/metrics always answers",
    "--enable-auto-tool-choice": "tool calls are always read",
    "--load-format": "a folder's files say what it is",
    "--distributed-executor-backend": "a process has all of its host's devices",
}
"""Options of theirs that nothing here corresponds to, and why it need not."""


def advice(words: Sequence[str], known: Iterable[str]) -> list[str]:
    """A line for each of the words of a command line that is another engine's option, and whose counterpart the command has.

    words: as typed. known: the command's own options.
    """
    known, lines = set(known), {}
    for word in words:
        name = word.partition("=")[0]
        if name in known:
            continue
        for names, here in HERE.items():
            if name in names.split() and here.split()[0].rstrip(":") in known:
                lines[name] = f"{name} is {here}"
        for names, why in NEEDLESS.items():
            if name in names.split() and "--mesh" in known:
                lines[name] = f"{name} is not needed: {why}"
    return list(lines.values())
