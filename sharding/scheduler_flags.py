"""What XLA's schedulers have to be told, before JAX starts, so that an exchange runs beside the computation that it is put beside."""

import importlib.util
import os

_NEEDED = (
    # Reckoning with what a kernel's operands have in all (a whole cache, a stack of all layers' weights), XLA expects attention alone to
    # outlast any exchange, and starts one no earlier than just before it: what stands in the window before it runs beside nothing.
    # Exchanges of a second are as long, so that each starts as soon as it can. XLA has this option as a flag of the process only.
    (
        "jax_cuda13_plugin",
        "XLA_FLAGS",
        "--xla_gpu_analytical_latency_estimator_options",
        "nccl_op_launch_us=1000000,rtt_us=1000000",
    ),
    # Otherwise an all-to-all is synchronous on a TPU.
    ("libtpu", "LIBTPU_INIT_ARGS", "--xla_tpu_enable_async_all_to_all", "true"),
)


def start_exchanges_early() -> None:
    """Set the flags of the accelerators' compilers that are installed, where the user has not. JAX must not have started."""
    for compiler, variable, flag, value in _NEEDED:
        flags = os.environ.get(variable, "")
        if flag not in flags and importlib.util.find_spec(compiler) is not None:
            os.environ[variable] = f"{flags} {flag}={value}".strip()
