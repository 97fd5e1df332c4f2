"""XLA flags that make its schedulers overlap an exchange with the computation beside it. They must be set before JAX starts."""

import importlib.util
import os

_NEEDED = (
    # XLA estimates a kernel's time from the full size of its operands (the whole KV cache, the stacked weights of all layers). It expects
    # attention alone to outlast any collective, so it starts collectives just before attention and overlaps them with nothing earlier. An
    # assumed duration of one second makes each collective start as early as possible. XLA offers this only as a flag of the process.
    (
        "jax_cuda13_plugin",
        "XLA_FLAGS",
        "--xla_gpu_analytical_latency_estimator_options",
        "nccl_op_launch_us=1000000,rtt_us=1000000",
    ),
    # Without this, an all-to-all is synchronous on a TPU.
    ("libtpu", "LIBTPU_INIT_ARGS", "--xla_tpu_enable_async_all_to_all", "true"),
)


def start_exchanges_early() -> None:
    """Set the flags of installed accelerator compilers unless the user has set them. Call it before JAX starts."""
    for compiler, variable, flag, value in _NEEDED:
        flags = os.environ.get(variable, "")
        if flag not in flags and importlib.util.find_spec(compiler) is not None:
            os.environ[variable] = f"{flags} {flag}={value}".strip()
