"""JAX's persistent compilation cache: the second start finds the programs of the first."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

LEAST_SECONDS = 0.2
"""Programs that compile faster are not worth a file."""


def cache_folder() -> Path:
    """Where compiled programs and kernels are kept; it need not exist."""
    if jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsjax" / "compiled"


def enable_compile_cache() -> Path | None:
    """Keep compiled programs on disk; the directory, or None where it cannot be written.

    ``JAX_COMPILATION_CACHE_DIR`` decides where, if set; otherwise ``dsjax/compiled`` in the user's cache folder. The
    programs themselves do not depend on it.
    """
    if jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warnings.warn(f"compiled programs will not be kept: cannot write {folder} ({error.strerror})", stacklevel=2)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)
    return folder


@contextmanager
def without_compile_cache() -> Iterator[None]:
    """Compile in earnest, for whoever reads what the compiler writes beside its result."""
    folder = jax.config.jax_compilation_cache_dir
    if folder is None:
        yield
        return
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()  # JAX asks once whether there is one
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()
