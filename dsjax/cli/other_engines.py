"""What vLLM's and SGLang's options are called here, for whoever types them by heart; and what replaces options that dsjax had."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from dsjax.config.weights import PACKED, SERVED

HERE = {
    "--tensor-parallel-size -tp --tp-size --tp": "--mesh tp=N: devices of an attention replica",
    "--data-parallel-size -dp --dp-size --dp --attn-dp-size --attention-data-parallel-size": (
        "--mesh dp=N: N attention replicas; SGLang's have tp-size ÷ dp-size devices each, which is tp here"
    ),
    "--enable-expert-parallel -ep": (
        "--mesh dp=N,tp=N: experts are spread over all devices; with ep=1 each expert is cut over the tp devices"
    ),
    "--ep-size --ep --expert-parallel-size": (
        "--mesh dp=N,ep=N: so many devices together hold each expert once; default: all devices"
    ),
    "--moe-dp-size --moe-data-parallel-size": "--mesh dp=N,ep=M: experts are there dp × tp ÷ ep times",
    "--enable-dp-attention": "--mesh dp=N: attention of DP ranks is always apart",
    "--pipeline-parallel-size -pp --pp-size --pp": (
        "--mesh pp=N,tp=N: N stages, of dp × tp devices each; --pp-layer-partition says how many layers each has"
    ),
    "--pp-max-micro-batch-size": "--max-num-seqs: of all steps under way together; each decodes up to its pp-th part of them",
    "--model-path": "--model",
    "--context-length": "--max-model-len",
    "--max-running-requests": "--max-num-seqs: of a DP rank, not of all",
    "--max-total-tokens --num-gpu-blocks-override": "--cache-tokens: token slots of a DP rank's cache",
    "--kv-cache-memory-bytes": "--cache-tokens: in token slots of a DP rank, not in bytes",
    "--device-memory-utilization": "--gpu-memory-utilization",
    "--block-size": "--page-size",
    "--chunked-prefill-size": (
        "--prefill-chunk: most tokens of one prompt in a step; --max-num-batched-tokens bounds the whole step"
    ),
    "--long-prefill-token-threshold": "--prefill-chunk: most tokens of one prompt in a step, however long it is",
    "--max-prefill-tokens --max-num-scheduled-tokens": "--max-num-batched-tokens",
    "--schedule-policy": "--scheduling-policy",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--disable-overlap-schedule": "--no-async-scheduling",
    "--quantization -q --quantization-config --modelopt-quant": (
        f"--weights {', '.join(SERVED)}: {', '.join(PACKED)} keep routed experts in four bits, of which ModelOpt's and compressed-tensors' "
        "checkpoints are read; integers (awq, gptq, w8a8_int8, w4afp8) are not; --activation-scheme says to what activations are quantised"
    ),
    "--attention-backend --prefill-attention-backend --decode-attention-backend --moe-runner-backend --moe-backend --dsa-*-backend "
    "--nsa-*-backend --sparse-*-topk-backend --fp?-gemm-backend --bf16-gemm-backend --linear-backend": "--kernels",
    "--enable-deterministic-inference": "--batch-invariant",
    "--all2all-backend --moe-a2a-backend --deepep-mode --deepep-v2-mode": "--dispatch",
    "--deepep-dispatcher-output-dtype": "--dispatch-wire",
    "--tbo-token-distribution-threshold --ubatch-size": (
        "--enable-dbo: a large step is computed in two halves; every second row goes to each, and a row alone is cut in the middle"
    ),
    "--disable-shared-experts-fusion": "--no-enable-shared-experts-fusion",
    "--enforce-shared-experts-fusion": "--enable-shared-experts-fusion",
    "--ep-num-redundant-experts --num-redundant-experts": (
        """--redundant-experts; with --enable-eplb also --eplb-config '{"num_redundant_experts": N}'"""
    ),
    "--expert-placement-strategy": "--init-expert-location: without it experts are placed in order (linear)",
    "--eplb-window-size": """--eplb-config '{"window_size": N}'""",
    "--eplb-step-interval --eplb-rebalance-num-iterations": """--eplb-config '{"step_interval": N}'""",
    "--eplb-log-balancedness --expert-balancedness-report-mode": """--eplb-config '{"log_balancedness": true}'""",
    "--eplb-algorithm": "--eplb-config '{\"policy\": P}': auto, global or hierarchical",
    "--eplb-rebalance-layers-per-chunk": (
        """--eplb-config '{"max_bytes_per_step": N}': what a device receives between two steps, in bytes, not in layers"""
    ),
    "--eplb-min-rebalancing-utilization-threshold": (
        """--eplb-config '{"payback": X}': a layer is changed where its gain is at least X times its cost"""
    ),
    "--speculative-* --spec-method --spec-tokens": (
        """--speculative-config '{"method": "mtp", "num_speculative_tokens": N}'"""
    ),
    "--enable-hierarchical-cache --enable-hicache --hicache-size --hicache-ratio --swap-space --kv-offloading-size": (
        "--host-cache-bytes"
    ),
    "--hicache-storage-backend": "--disk-cache: a folder, with --disk-cache-bytes; other stores are a --page-source of yours",
    "--kv-transfer-config": (
        "--disaggregation-transfer-backend: of pages between the sides of --prefill-mesh and --decode-mesh, or of two `dsjax dynamo` with "
        "--disaggregation-mode; what a connector offloads goes to --host-cache-bytes and --disk-cache"
    ),
    "--cpu-offload-gb": "--embedding-location host: the embedding alone; other weights stay on the devices",
    "--dist-init-addr --master-addr --data-parallel-address -dpa": "--coordinator-address HOST:PORT",
    "--master-port --data-parallel-rpc-port -dpp": "--coordinator-address HOST:PORT, of which it is the port",
    "--nnodes": "--num-processes",
    "--node-rank --data-parallel-rank -dpn --data-parallel-start-rank -dpr": "--process-id: of this host, not of a replica",
    "--random-seed": "--seed",
    "--watchdog-timeout": "--step-timeout",
}
"""From the options of vLLM and SGLang to ours, each followed by what differs. Spaces stand between names; `*` is any text, `?` a letter."""

NEEDLESS = {
    "--trust-remote-code": "no code of a checkpoint is ever run",
    "--enforce-eager --disable-cuda-graph --cuda-graph-* --cudagraph-capture-sizes --max-cudagraph-capture-size --compilation-config "
    "--enable-torch-compile": "every step is a program compiled before the first request",
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--enable-mixed-chunk": "chunks of prompts and decodes share a step",
    "--enable-metrics": "/metrics always answers",
    "--enable-auto-tool-choice": "tool calls are always read",
    "--load-format": "a folder's files say what it is",
    "--distributed-executor-backend --data-parallel-backend -dpb --data-parallel-size-local -dpl": (
        "a process has all of its host's devices"
    ),
    "--headless": "each process is given the same options; those with another --process-id than 0 answer no requests",
    "--data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe --data-parallel-multi-port-external-lb "
    "--data-parallel-supervisor-port --load-balance-method": (
        "one address serves all DP ranks, and its scheduler sends a request to the one with the least to do that has its prefix"
    ),
    "--spec-model --speculative-draft-model --speculative-draft-model-path": "the draft is the MTP module of the checkpoint itself",
    "--enable-ep-weight-filter": "a process reads the experts of its own devices alone",
    "--enable-elastic-ep --elastic-ep-* --max-ep-size": "a mesh goes on without lost hosts, and /scale changes it",
    "--pp-async-batch-depth": "as many steps are under way as there are stages",
    "--quantization-param-path": "an FP8 cache has the scales of its own values",
    "--disaggregation-bootstrap-port": "the sides of `dsjax dynamo` find each other through Dynamo",
    "--expert-distribution-recorder-*": "/start_expert_distribution_record begins a record",
}
"""Options of theirs that nothing here corresponds to, and why it need not."""

ABSENT = {
    "--decode-context-parallel-size -dcp --dcp-* --prefill-context-parallel-size -pcp --cp-* --attn-cp-size "
    "--attention-context-parallel-size --enable-prefill-cp": (
        "no context is spread over devices: every device of a replica keeps the latents of all its tokens; more of dp has more of them"
    ),
    "--enable-single-batch-overlap": "one batch's exchanges run beside nothing but what XLA puts there; --enable-dbo has two halves",
    "--shared-experts-tp-size": "the shared expert is cut over all tp devices of a replica",
    "--dwdp-size": "tokens go to their experts; no expert's weights are fetched for them",
    "--deepep-config": "exchanges are XLA's, for which no processors are set apart",
    "--disaggregation-ib-device --mooncake-ib-device": "the network's devices are chosen by what moves the pages (UCX_NET_DEVICES of NIXL)",
}
"""Options of theirs whose ability nothing here has, and what comes closest."""

REMOVED = {
    "--cluster-tls-*": (
        "control messages between processes are always encrypted, with --cluster-key-file; --encrypt-bulk encrypts hidden states and "
        "expert rows too"
    )
}
"""Options of earlier versions of dsjax, and what replaces them."""

VARIABLES = {
    "VLLM_BATCH_INVARIANT": "--batch-invariant",
    "VLLM_ALL2ALL_BACKEND": "--dispatch",
    "VLLM_MOE_DP_CHUNK_SIZE": "--moe-chunk-tokens",
    "VLLM_PP_LAYER_PARTITION": "--pp-layer-partition",
    "SGLANG_PP_LAYER_PARTITION": "--pp-layer-partition",
}
"""From their environment variables, none of which is read here, to the option that says the same."""


def advice(words: Sequence[str], known: Iterable[str]) -> list[str]:
    """A line for each of the words of a command line that is another engine's option, or an earlier version's, and whose counterpart the
    command has.

    words: as typed. known: the command's own options.
    """
    known, lines = set(known), {}
    for word in words:
        name = word.partition("=")[0]
        if name in known or not name.startswith("-"):
            continue
        here = _named(HERE, name)
        if here is not None and here.split()[0].rstrip(":;") in known:
            lines[name] = f"{name} is {here}"
        tables = ((NEEDLESS, "is not needed"), (ABSENT, "has no counterpart here"), (REMOVED, "was removed"))
        for table, verdict in tables:
            why = _named(table, name)
            if why is not None and "--mesh" in known:
                lines[name] = f"{name} {verdict}: {why}"
    return list(lines.values())


def unread_variables(words: Sequence[str], known: Iterable[str], environment: Mapping[str, str]) -> list[str]:
    """A line for each variable of theirs that is set, and whose option the command has, but was not given.

    words: as typed. known: the command's own options.
    """
    typed = {word.partition("=")[0] for word in words}
    return [
        f"{name} is set, and not read here: give {option}, or unset it"
        for name, option in VARIABLES.items()
        if environment.get(name, "").strip().lower() not in ("", "0", "false")
        and option in set(known)
        and not typed & {option, option.replace("--", "--no-", 1)}
    ]


def _named(table: Mapping[str, str], name: str) -> str | None:
    return next((text for names, text in table.items() if any(fnmatchcase(name, one) for one in names.split())), None)
