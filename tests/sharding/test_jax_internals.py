"""What reaches into JAX: its cache of compiled programs keeps those of every process, whole or not at all."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from sharding.jax_internals import keep_programs_of_every_process

ROOT = Path(__file__).parents[2]

# One of two processes that compile a program over both: prints what became of it in the cache, which is a folder of its own.
PROCESS = """
import json, sys
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from dsjax.engine.device.process import enable_compile_cache

index, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
enable_compile_cache()
said = []
jax.monitoring.register_event_listener(lambda event, **_: said.append(event.rpartition("/")[2]))
jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
everywhere = NamedSharding(Mesh(jax.devices(), "x"), PartitionSpec())
jax.jit(lambda: jnp.arange(8) * 2, out_shardings=everywhere).lower().compile()
jax.distributed.shutdown()
print(json.dumps({event: said.count(event) for event in ("cache_hits", "cache_misses")}))
"""


def start_both(folder: Path) -> list[dict]:
    """Start both processes, each with its own folder of the cache; what each said."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for index in range(2):
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder / str(index)), "PYTHONPATH": str(ROOT)}
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
        command = [sys.executable, "-c", PROCESS, str(index), str(port)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    return [json.loads(process.communicate(timeout=400)[0].splitlines()[-1]) for process in processes]


@pytest.mark.slow
def test_each_process_of_a_mesh_finds_its_programs_when_it_is_started_again(tmp_path):
    assert start_both(tmp_path) == [{"cache_hits": 0, "cache_misses": 1}] * 2
    assert start_both(tmp_path) == [{"cache_hits": 1, "cache_misses": 0}] * 2


def test_an_entry_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    from jax._src.lru_cache import LRUCache

    keep_programs_of_every_process()
    cache = LRUCache(str(tmp_path), max_size=-1)
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            cache.put("program", b"half of it")
    assert not list(tmp_path.iterdir())
    cache.put("program", b"all of it")
    cache.put("program", b"another")
    assert cache.get("program") == b"all of it"
    assert len(list(tmp_path.iterdir())) == 1
