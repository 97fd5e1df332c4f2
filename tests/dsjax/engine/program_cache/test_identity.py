"""A digest is the same for what is the same, in whichever process, and another for everything else; what cannot be told has none."""

import dataclasses
import enum
import functools
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsjax.engine.program_cache import identity
from dsjax.engine.program_cache.identity import NotDescribed, digest
from dsjax.model.forms import Form


@pytest.fixture(autouse=True)
def described_here(monkeypatch):
    """The classes of this file count as the project's own."""
    monkeypatch.setattr(identity, "_DESCRIBED", {*identity._DESCRIBED, Colour.__module__})


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


@dataclasses.dataclass(frozen=True)
class Pair:
    first: object
    second: object = None
    note: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True)
class AlsoPair:
    first: object
    second: object = None


def mesh(order, shape=(2, 2), names=("a", "b")) -> Mesh:
    return Mesh(np.array([jax.devices()[i] for i in order]).reshape(shape), names)


def described(shape=(4, 4), dtype=jnp.float32, spec=P("a")):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh(range(4)), spec))


def returns(value):
    @functools.wraps(sorted)
    def function(*_):
        return value

    return function


VALUES = [
    *(None, 0, 1, 1.0, True, "1", b"1"),
    *((), [], (1, 2), [1, 2], (12,), ("1", "2"), ("12",), ((1,), 2), (1, (2,))),
    *({}, {"a": 1}, {"a": 2}, {"b": 1}, MappingProxyType({"a": 1}), MappingProxyType({"a": 2})),
    *(frozenset({"a"}), frozenset({"b"}), Colour.RED, Colour.GREEN),
    *(Pair(1, 2), Pair(2, 1), Pair(1), AlsoPair(1, 2)),
    *(np.arange(4), np.arange(4).reshape(2, 2), np.arange(4, dtype=np.int32), np.arange(1, 5)),
    *(np.float32(1), np.dtype(np.float32), np.dtype(jnp.bfloat16), jnp.bfloat16),
    *(functools.partial(sorted, reverse=True), functools.partial(sorted, reverse=False), sorted),
    *(mesh(range(4)), mesh(range(4), (4, 1)), mesh(range(4), names=("b", "a"))),
    *(described(), described((4, 2)), described(dtype=jnp.bfloat16)),
    *(described(spec=P("b")), described(spec=P(("a", "b"))), described(spec=P("a", "b"))),
    *(jax.tree.structure({"a": 1}), jax.tree.structure({"b": 1})),
    *(Path(os.fsdecode(b"/home/jos\xe9")), Path("/home/jose")),
]


def test_values_that_differ_have_digests_that_differ():
    digests = [digest(value) for value in VALUES] + [digest(1, 2), digest(1), digest()]
    assert len(set(digests)) == len(VALUES) + 2, "of these, only 1 is there twice"


def test_equal_values_have_one_digest():
    assert digest({"a": 1, "b": [2.5]}) == digest({"a": 1, "b": [2.5]})
    assert digest(np.arange(6).reshape(2, 3).T) == digest(np.ascontiguousarray(np.arange(6).reshape(2, 3).T))
    assert digest(Pair(1, 2, "built in 17 s")) == digest(Pair(1, 2)), "notes take no part in a comparison"


def test_which_devices_a_mesh_has_does_not_matter():
    assert digest(mesh([0, 1, 2, 3])) == digest(mesh([5, 1, 7, 2]))


def test_another_process_finds_the_same_digest():
    value = "{'x': frozenset(map(str, range(50)))}, (None, 1.5, 'ä')"
    program = f"from dsjax.engine.program_cache.identity import digest\nprint(digest({value}), end='')"
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)}
    found = subprocess.check_output([sys.executable, "-c", program], text=True, env=environment)
    assert found == digest(*eval(value))


def test_what_cannot_be_told_apart_has_no_digest():
    functions = lambda: 1, returns(1), functools.partial(lambda x: x, 1)
    for value in (*functions, object(), np.array([object()]), Pair((1, [{"deep": threading.Lock()}])), jnp.ones(2)):
        with pytest.raises(NotDescribed):
            digest(value)


def test_a_callers_own_class_has_no_digest_since_it_may_change():
    own = type("Own", (Form,), {"name": "own", "__module__": "own_form"})
    for value in (own, own(), Pair(own())):
        with pytest.raises(NotDescribed, match=r"own_form\.Own is defined in a module whose source is not in"):
            digest(value)


def test_code_settings_and_flags_are_part_of_every_program(monkeypatch, tmp_path):
    client = jax.devices()[0].client
    before = identity.of_process(client)
    assert identity.of_process(client) == before
    seen = {before}

    def differs() -> None:
        assert identity.of_process(client) not in seen
        seen.add(identity.of_process(client))

    with monkeypatch.context() as patch:
        patch.setattr(identity, "SOURCES", dataclasses.replace(identity.SOURCES, digest="other sources"))
        differs()
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        differs()
        patch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
        for flags in ("--xla_cpu_enable_fast_math=false", "--xla_cpu_enable_fast_math=true"):
            (tmp_path / "flags").write_text(flags)
            differs()
    with monkeypatch.context() as patch:
        patch.setattr(identity, "most_threads", lambda: 77)  # native kernels are told how many
        differs()
    with jax.default_matmul_precision("float32"):
        differs()
    with jax.log_compiles(not jax.config.jax_log_compiles):
        assert identity.of_process(client) == before


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A package in the place of `sharding`, whose files can be changed."""
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "module.py").write_text("x = 1")
    monkeypatch.setattr(identity.sharding, "__file__", str(tmp_path / "__init__.py"))
    return tmp_path


def test_sources_that_have_changed_since_they_were_imported_name_nothing(package):
    sources = identity._Sources.now()
    assert sources.are_those_that_run
    (package / "module.py").write_text("x = 2  # by an update")
    assert not sources.are_those_that_run
    assert identity._Sources.now().digest != sources.digest
    (package / "module.py").unlink()
    assert not sources.are_those_that_run


def test_an_editors_lock_is_no_source(package):
    before = identity._Sources.now().digest
    (package / ".#module.py").symlink_to("somebody@somewhere.123")
    assert identity._Sources.now().digest == before


def test_without_sources_no_program_has_a_name(package, monkeypatch):
    for path in package.iterdir():
        path.unlink()
    monkeypatch.setattr(identity, "SOURCES", identity._Sources.now())
    with pytest.raises(NotDescribed, match="sources of dsjax cannot be read"):
        identity.of_process(jax.devices()[0].client)


def test_a_mesh_counts_by_which_devices_share_a_process_and_not_by_which_process_that_is():
    """What was compiled ahead for the loss of one process serves after the loss of another."""

    def mesh_of(*processes):
        alike = {"platform": "cpu", "device_kind": "cpu"}
        devices = [SimpleNamespace(id=i, process_index=p, **alike) for i, p in enumerate(processes)]
        value = object.__new__(Mesh)
        value.__dict__.update(devices=np.array(devices), axis_names=("dp",), axis_types=None)
        return list(identity._describe(value))

    assert mesh_of(0, 0, 2, 2, 3, 3) == mesh_of(0, 0, 1, 1, 3, 3)
    assert mesh_of(0, 0, 1, 1, 2, 2) != mesh_of(0, 0, 0, 1, 1, 1)
