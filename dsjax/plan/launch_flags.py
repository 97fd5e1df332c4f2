"""A layout in the flags of vLLM, SGLang and TensorRT-LLM: what each engine's documentation has for it, and what is left unsaid."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

from dsjax.plan.balancing import STEP_INTERVAL
from dsjax.plan.instance import Instance
from dsjax.plan.launch import ADDRESS, HEAD, KEY, PORTS, LaunchCommand, Limits, unfit
from dsjax.plan.precision import BF16

_WINDOW = 1000
"""Steps whose loads a balancer looks at: vLLM's default, and what the published recipes for DeepSeek-R1 give."""
_DBO_DECODE, _DBO_PREFILL = 32, 512
"""Tokens of a rank from which vLLM halves a batch: its defaults, and what the published recipes give."""
_BOOTSTRAP = 30001
"""Port at which SGLang's decode servers ask a prefill server for a request's pages, as in the published recipes."""
_WAIT_FOR_PROMPTS = 60
"""Steps for which TensorRT-LLM holds prompts back until every replica has some, as InferenceX's scripts for DeepSeek-R1 give."""
_MANY_STREAMS, _STREAM_INTERVAL = 512, 20
"""From so many streams on, tokens are sent so many at a time, as in the published recipe for GB200."""


def launch(
    engine: str, model: str, instance: Instance, batch: float, tokens: float, role: str, instances: int
) -> LaunchCommand:
    """One service of a plan as an engine starts it.

    batch: running requests of a DP rank. tokens: prompt tokens of a DP rank in a step. role: `prefill and decode`, `prefill` or
    `decode`. instances: of the layout; copies of the experts are instances of their own here.
    """
    layout, cluster = instance.layout.unit, instance.cluster
    hosts = math.ceil(layout.devices / cluster.devices_per_host)
    made = LaunchCommand(engine, model, role, instances * instance.layout.mesh.expert_copies, hosts, layout.devices)
    limits = Limits(instance, batch, tokens, role)
    reason = unfit(engine, instance.layout, cluster.devices_per_host, cluster.hardware, instance.options.precision)
    if reason:
        made.lacks.append(reason)
    {"vllm": _vllm, "sglang": _sglang, "tensorrt-llm": _tensorrt}[engine](made, instance, limits)
    made.lacks += list(_common(made, instance))
    return made


def _common(made: LaunchCommand, instance: Instance) -> Iterator[str]:
    """What none of them can say, or takes from the checkpoint."""
    precision, cluster = instance.options.precision, instance.cluster
    if precision.expert >= BF16:
        yield "The weights are bf16 in the estimate; the command needs a checkpoint in bf16, and DeepSeek's is FP8."
    if precision.expert < 1:
        yield "The experts are FP4 in the estimate; the command needs an NVFP4 checkpoint, such as nvidia/DeepSeek-R1-0528-FP4."
    if precision.name == "int8":
        yield "The weights are INT8 in the estimate; the command needs such a checkpoint, as meituan/DeepSeek-R1-Block-INT8 is."
    if made.devices < cluster.devices_per_host:
        yield (
            f"An instance takes {made.devices} of a host's {cluster.devices_per_host} devices: give each its own CUDA_VISIBLE_DEVICES and "
            "port."
        )
    if instance.workload.prefix_hit:
        yield "The prefix hits of the workload come from the requests, not from the command; prefix caching is on by default."


def _vllm(made: LaunchCommand, instance: Instance, limits: Limits) -> None:
    mesh, options = instance.layout.unit.mesh, instance.options
    dp, tp, host = mesh.dp_size, mesh.tp_size, instance.cluster.devices_per_host
    made.put("--host", ADDRESS)
    made.put("--port", PORTS[made.role])
    made.put("--tensor-parallel-size", tp)
    if dp > 1:
        made.put("--data-parallel-size", dp)
    if made.hosts > 1:
        made.each_host = [{} for _ in range(made.hosts)]
        for rank in range(made.hosts):
            if dp > 1 and tp <= host:
                local = host // tp
                made.put("--data-parallel-size-local", min(local, dp - rank * local), rank)
                made.put("--data-parallel-address", HEAD, rank)
                made.put("--data-parallel-rpc-port", 13345, rank)
                if rank:
                    made.put("--data-parallel-start-rank", rank * local, rank)
            else:
                made.put("--nnodes", made.hosts, rank)
                made.put("--node-rank", rank, rank)
                made.put("--master-addr", HEAD, rank)
            if rank:
                made.put("--headless", host=rank)
            elif dp > 1:
                made.put("--api-server-count", min(host, dp), rank)
    elif dp > 1:
        made.put("--api-server-count", dp)
    if options.host == "overlapped":
        made.put("--async-scheduling")
    if options.precision.linear < BF16 and instance.cluster.hardware.platform == "cuda":
        made.put_variable("VLLM_USE_DEEP_GEMM", 1)
    spread = mesh.ep_size == made.devices > 1
    if spread:
        made.put("--enable-expert-parallel")
    if spread and dp > 1:
        backend = "deepep_low_latency" if made.role == "decode" else "deepep_high_throughput"
        made.put("--all2all-backend", backend)
        made.put_variable("VLLM_RANDOMIZE_DP_DUMMY_INPUTS", 1)
        if made.role != "prefill":
            made.lacks.append(
                "DeepEP's normal kernels are priced for prompts and the faster of its two kinds for decodes; vLLM starts one kind."
            )
    if limits.overlaps:
        made.put("--enable-dbo")
        made.put("--dbo-decode-token-threshold", _DBO_DECODE)
        made.put("--dbo-prefill-token-threshold", _DBO_PREFILL)
    if instance.layout.redundant:
        made.put("--enable-eplb")
        balancing = {"window_size": _WINDOW, "step_interval": STEP_INTERVAL, "log_balancedness": False}
        made.put("--eplb-config", json.dumps({"num_redundant_experts": instance.layout.redundant} | balancing))
    made.put("--max-model-len", limits.length)
    made.put("--max-num-seqs", limits.seqs)
    verified = limits.seqs * (1 + options.drafts)
    made.put("--max-num-batched-tokens", max(verified, limits.tokens + (0 if made.role == "prefill" else verified)))
    if made.role != "prefill":
        made.put("--max-cudagraph-capture-size", verified)
    if made.role == "decode":
        made.put("--compilation-config", json.dumps({"cudagraph_mode": "FULL_DECODE_ONLY"}))
    made.put("--gpu-memory-utilization", f"{limits.share:g}")
    made.lacks.append(
        "--gpu-memory-utilization is what weights and caches take in the estimate; vLLM takes a step's temporaries out of it too, so that "
        "its cache is smaller by them."
    )
    if options.precision.cache < BF16:
        made.put("--kv-cache-dtype", "fp8")
    if options.drafts:
        made.put("--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": options.drafts}))
    if instance.layout.fused:
        made.lacks.append("The shared expert is a routed one in the estimate; vLLM's documentation has no flag for it.")
    if made.role != "prefill and decode":
        made.put("--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"}))
        made.lacks.append(
            "vLLM's guide to the NixlConnector puts a proxy of its own tests in front of both sides; in production a router is needed."
        )


def _sglang(made: LaunchCommand, instance: Instance, limits: Limits) -> None:
    mesh, options = instance.layout.unit.mesh, instance.options
    dp = mesh.dp_size
    made.put("--model-path", made.model)
    made.put("--host", ADDRESS)
    made.put("--port", PORTS[made.role])
    made.put("--tp-size", made.devices)
    if made.role == "prefill and decode":
        made.put("--api-key", KEY)
    if dp > 1:
        made.put("--attn-dp-size", dp)
        made.put("--enable-dp-lm-head")
        if mesh.tp_size == 1:
            made.put("--moe-dense-tp-size", 1)
    if made.hosts > 1:
        made.each_host = [{} for _ in range(made.hosts)]
        for rank in range(made.hosts):
            made.put("--dist-init-addr", f"{HEAD}:20000", rank)
            made.put("--nnodes", made.hosts, rank)
            made.put("--node-rank", rank, rank)
    if mesh.ep_size > 1:
        made.put("--ep-size", mesh.ep_size)
    if options.engine.gathers:
        made.put("--moe-a2a-backend", "none")
    elif mesh.ep_size == made.devices > 1 and dp > 1:
        made.put("--moe-a2a-backend", "deepep")
        mode = {"prefill": "normal", "decode": "low_latency"}.get(made.role, "auto")
        made.put("--deepep-mode", mode)
        if made.role != "prefill":
            made.lacks.append(
                f"The faster of DeepEP's two kinds of kernels is priced for decodes; --deepep-mode {mode} takes the low-latency ones."
            )
    elif mesh.ep_size > 1 and dp > 1:
        made.lacks.append(
            "DeepEP's exchange is priced; SGLang has it where experts are whole, and sums or gathers over all devices where they are cut."
        )
    if limits.overlaps:
        made.put("--enable-two-batch-overlap")
    if instance.layout.redundant:
        made.put("--enable-eplb")
        made.put("--ep-num-redundant-experts", instance.layout.redundant)
        made.put("--eplb-rebalance-num-iterations", STEP_INTERVAL)
        made.put("--expert-distribution-recorder-buffer-size", _WINDOW)
    if not instance.layout.fused:
        made.put("--disable-shared-experts-fusion")
    made.put("--context-length", limits.length)
    # Both are of all DP ranks of an instance together.
    made.put("--max-running-requests", limits.seqs * dp)
    if limits.tokens:
        made.put("--chunked-prefill-size", limits.tokens * dp)
        made.put("--max-prefill-tokens", limits.tokens)
    if made.role == "prefill and decode" and not options.drafts:
        made.put("--enable-mixed-chunk")
    elif made.role == "prefill and decode":
        made.lacks.append(
            "Prompts are computed beside decodes in the estimate; SGLang switches --enable-mixed-chunk off where it drafts, and "
            "computes them in steps of their own."
        )
    if made.role != "prefill":
        made.put("--cuda-graph-max-bs-decode", limits.seqs)
    made.put("--mem-fraction-static", f"{limits.share:g}")
    if options.precision.cache < BF16:
        made.put("--kv-cache-dtype", "fp8_e4m3")
    if options.precision.expert < 1:
        made.put("--quantization", "modelopt_fp4")
    if options.engine.fp8_rate:
        made.put("--fp8-gemm-backend", "flashinfer_trtllm")
    if options.drafts:
        made.put("--speculative-algorithm", "NEXTN")
        made.put("--speculative-num-steps", options.drafts)
        made.put("--speculative-eagle-topk", 1)
        made.put("--speculative-num-draft-tokens", options.drafts + 1)
    if made.role != "prefill and decode":
        made.put("--disaggregation-mode", made.role)
        made.put("--disaggregation-transfer-backend", "nixl")
        made.put("--disaggregation-bootstrap-port", _BOOTSTRAP)


def _tensorrt(made: LaunchCommand, instance: Instance, limits: Limits) -> None:
    mesh, options, hardware = instance.layout.unit.mesh, instance.options, instance.cluster.hardware
    made.put("--host", ADDRESS)
    made.put("--port", PORTS[made.role])
    made.put("--backend", "pytorch")
    made.put("--tp_size", made.devices)
    made.put("--ep_size", mesh.ep_size)
    if made.hosts > 1:
        made.put("--gpus_per_node", made.devices // made.hosts)
    made.put("--max_batch_size", limits.seqs)
    verified = limits.seqs * (1 + options.drafts)
    made.put("--max_num_tokens", max(verified, limits.tokens + (0 if made.role == "prefill" else verified)))
    # A prefill worker makes the first token and no more.
    made.put("--max_seq_len", limits.prompt + 1 if made.role == "prefill" else limits.length)
    if limits.cuts:
        made.put("--enable_chunked_prefill")
    made.put("--extra_llm_api_options", made.file)
    made.key("enable_attention_dp", mesh.dp_size > 1)
    if mesh.dp_size > 1 and made.role == "prefill and decode":
        made.key("attention_dp_config.enable_balance", True)
        made.key("attention_dp_config.timeout_iters", _WAIT_FOR_PROMPTS)
        made.key("attention_dp_config.batching_wait_iters", 0)
    if made.role != "prefill":
        made.key("cuda_graph_config.enable_padding", True)
        made.key("cuda_graph_config.max_batch_size", limits.seqs)
    else:
        made.key("cuda_graph_config", None)
    made.key("kv_cache_config.dtype", "fp8" if options.precision.cache < BF16 else "auto")
    made.key("kv_cache_config.free_gpu_memory_fraction", limits.free)
    fp4, wide = options.precision.expert < 1, hardware.links_hosts and mesh.ep_size > 8
    backend = "WIDEEP" if wide else "DEEPGEMM" if hardware.is_blackwell and not fp4 else "CUTLASS"
    made.key("moe_config.backend", backend)
    if instance.layout.redundant:
        made.key("moe_config.load_balancer.num_slots", instance.config.n_routed_experts + instance.layout.redundant)
        made.key("moe_config.load_balancer.layer_updates_per_iter", 1)
    if options.drafts:
        made.key("speculative_config.decoding_type", "MTP")
        made.key("speculative_config.num_nextn_predict_layers", options.drafts)
    if mesh.ep_size > 1 and mesh.dp_size > 1:
        made.lacks.append(
            "DeepEP's exchange is priced; TensorRT-LLM chooses the exchange itself and has no documented flag for it."
        )
    if limits.overlaps:
        made.lacks.append("Two half batches overlap in the estimate; TensorRT-LLM's documentation has no such option.")
    if instance.layout.fused:
        made.lacks.append(
            "The shared expert is a routed one in the estimate; TensorRT-LLM's documentation has no such option."
        )
    if not (hardware.is_hopper or hardware.is_blackwell):
        made.lacks.append(f"TensorRT-LLM's table of expert kernels does not name {hardware.name}.")
    if made.role != "prefill and decode":
        made.key("cache_transceiver_config.backend", "NIXL")
        made.key("cache_transceiver_config.max_tokens_in_buffer", max(limits.prompt, limits.step_tokens))
    if made.role != "prefill" and limits.seqs * mesh.dp_size >= _MANY_STREAMS:
        made.key("stream_interval", _STREAM_INTERVAL)
        made.lacks.append(
            f"Streams are sent {_STREAM_INTERVAL} tokens at a time (stream_interval), which keeps {limits.seqs * mesh.dp_size:,} of them "
            "from taking the host's time; take it out where single tokens must be seen."
        )
    if hardware.links_hosts and mesh.ep_size > 1:
        for name in ("NCCL_MNNVL_ENABLE", "NCCL_CUMEM_ENABLE", "TRTLLM_ENABLE_PDL"):
            made.put_variable(name, 1)
    if made.role == "prefill":
        made.key("disable_overlap_scheduler", True)
