"""XLA's flags for compiling tiny models quickly, and sizes of an engine with few shapes: of the tests, and of tools that check layouts.

With `--serving-compilation` on the command line there are no such flags, in the processes that a run starts neither: programs are then
compiled as `dsjax serve` compiles them.
"""

import atexit
import os
import shutil
import sys
import tempfile
from importlib.metadata import version

SERVING_FLAG = "--serving-compilation"
_SERVING = "DSJAX_SERVING_COMPILATION"
if SERVING_FLAG in sys.argv:
    os.environ[_SERVING] = "1"  # for the processes that share the tests

# Without LLVM's optimisations, which on tiny models cost more than they save; XLA's own passes all run. The code of fusions by
# the generator that was the only one until 2025, which takes half the time to compile with, and a program's code in one piece instead of
# up to 32, each of which LLVM begins anew with: a tenth of all instructions of an engine's start and run. (Of the last two jaxlib 0.11 has
# the first no more, and aborts at a flag that it does not know.) The tests are of our programs, not of XLA's code generators.
_QUICK = ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true")
if version("jaxlib").startswith("0.10."):
    _QUICK += ("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1")

QUICK_COMPILATION = () if _SERVING in os.environ else _QUICK


def keep_programs(prefix: str) -> None:
    """Keep compiled programs for this process and those that it starts, until it ends; to be called before the first one is compiled.

    A tool's runs that differ in scheduling alone have the same programs. Of a tool that is imported as a module nothing may be kept so: the
    tests have a folder of their own.
    """
    import jax

    folder = tempfile.mkdtemp(prefix=prefix)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


_PLAIN = {"page_size": 4, "kernels": "plain"}
FEW_SHAPES = _PLAIN | {"max_num_seqs": 1, "max_num_batched_tokens": 8, "prefill_chunk": 8, "max_model_len": 32}
"""Options of an engine that compiles two programs; with several rows there would be another one for decodes."""

_LARGE = {"max_model_len": 128, "cache_tokens": 512}
SEVERAL_ROWS = _PLAIN | {"max_num_seqs": 4, "max_num_batched_tokens": 16, "prefill_chunk": 16, **_LARGE}
"""Options of an engine that runs several requests at once on a DP rank.

Engines of equal sizes, mesh and model find each other's programs on disk, so use these unless a claim needs others.
"""
