"""Programs that are kept, and found again for other devices (`program_cache/serialized_program.py`): they compute the same."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from small_programs import lowered, mesh_of, programs_in, run_on

from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.program_cache import library as program_library
from dsjax.engine.program_cache.folder import ProgramFolder
from dsjax.engine.program_cache.library import ProgramLibrary, Shelf

HERE = [0, 1, 2, 3]


def same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1], [4, 5, 6, 7]])
def test_a_program_computes_the_same_on_devices_it_was_not_compiled_for(order):
    library, first, second = ProgramLibrary(), mesh_of(HERE), mesh_of(order)
    expected = run_on(Shelf(library, first, ("about",)).compile("key", lowered(first)), first)
    shelf = Shelf(library, second, ("about",))
    same(run_on(shelf.find("key"), second), expected)
    assert shelf.find("another key") is None
    assert Shelf(library, second, ("about something else",)).find("key") is None
    assert library.works


def test_so_does_one_that_came_out_of_the_cache_of_jax_itself(tmp_path, cache_settings):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    compilation_cache.reset_cache()
    first, second = mesh_of(HERE), mesh_of([3, 2, 1, 0])
    expected = run_on(lowered(first).compile(), first)
    assert list(tmp_path.iterdir())
    library = ProgramLibrary()  # as of a process that was started again
    Shelf(library, first, ("about",)).compile("key", lowered(first))
    same(run_on(Shelf(library, second, ("about",)).find("key"), second), expected)


def test_where_a_program_cannot_be_kept_that_is_said_once_and_it_is_compiled_all_the_same(caplog, monkeypatch):
    monkeypatch.setattr("dsjax.engine.program_cache.serialized_program.keep", lambda *_: 1 / 0)
    library, mesh = ProgramLibrary(), mesh_of(HERE)
    for key in "ab":
        assert run_on(Shelf(library, mesh, ("about",)).compile(key, lowered(mesh)), mesh)
    assert Shelf(library, mesh, ("about",)).find("a") is None
    assert len([record for record in caplog.records if "cannot be kept" in record.message]) == 1


def test_a_cache_is_made_as_large_as_its_programs_were_compiled_for_where_that_costs_little():
    library, found = ProgramLibrary(), ExecutorLimits(1, 1, 8, 4, 1000, 2, 32, 64)
    assert library.settled("dp=2", found) == found
    for foretold, pages in ((990, 990), (1001, 1000), (900, 1000)):
        library.pages["dp=2"] = foretold
        assert library.settled("dp=2", found).pages_per_rank == pages


def test_a_later_start_finds_a_program_on_disk(tmp_path):
    first, second, wanted = mesh_of(HERE), mesh_of([2, 0, 3, 1]), {"xla_embed_ir_in_executable": True}
    options = lambda key: wanted  # noqa: E731
    shelf = Shelf(ProgramLibrary(ProgramFolder.inside(tmp_path)), first, ("model", 1), options)
    expected = run_on(shelf.compile("key", lowered(first)), first)

    later = ProgramLibrary(ProgramFolder.inside(tmp_path))
    shelf = Shelf(later, second, ("model", 1), options)
    assert shelf.find("other key") is None
    assert Shelf(later, second, ("model", 1), lambda key: {"xla_embed_ir_in_executable": False}).find("key") is None
    assert Shelf(later, second, ("model", 2), options).find("key") is None
    assert Shelf(None, second, ("model", 1), options).find("key") is None
    assert shelf.has("key")
    same(run_on(shelf.find("key"), second), expected)
    assert later.folder.num_read == 2


def test_a_program_is_kept_in_memory_only_where_the_folder_does_not_have_it(tmp_path, monkeypatch):
    first, second = mesh_of(HERE), mesh_of([2, 0, 3, 1])
    library = ProgramLibrary(ProgramFolder.inside(tmp_path))
    shelf = Shelf(library, first, ("model",))
    expected = run_on(shelf.compile("on disk", lowered(first)), first)
    assert not library.in_memory
    monkeypatch.setattr(library.folder, "write", lambda name, data: False)
    shelf.compile("in memory", lowered(first))
    assert library.in_memory
    other = Shelf(library, second, ("model",))
    for key in ("in memory", "on disk"):
        same(run_on(other.find(key), second), expected)


def test_a_file_that_names_what_is_no_more_is_compiled_anew(tmp_path, caplog):
    mesh, folder = mesh_of(HERE), ProgramFolder.inside(tmp_path)
    Shelf(ProgramLibrary(folder), mesh, ("model",)).compile("key", lowered(mesh))
    [path] = folder.path.iterdir()
    folder.write(path.stem, b"no pickle")
    shelf = Shelf(ProgramLibrary(folder), mesh, ("model",))
    assert shelf.find("key") is None
    assert run_on(shelf.compile("key", lowered(mesh)), mesh)
    assert "cannot be kept" in caplog.text


def test_turns_are_for_programs_that_are_kept(tmp_path):
    mesh = mesh_of(HERE)
    first, second = programs_in(tmp_path, mesh), programs_in(tmp_path, mesh)
    turn = first.shelf.compile_lock(("a",))
    assert second.shelf.compile_lock(("a",)) is None
    assert second.shelf.compile_lock((lambda: "a key without a name",)) is not None
    second.shelf._library.give_up(ValueError("another JAX"))
    assert second.shelf.compile_lock(("a",)) is not None
    turn.close()


def test_whatever_keeps_programs_from_having_a_name_a_start_goes_on(tmp_path, monkeypatch, caplog):
    mesh = mesh_of(HERE)
    monkeypatch.setattr(program_library.identity, "of_process", lambda client: 1 / 0)
    library = ProgramLibrary(ProgramFolder.inside(tmp_path))
    with caplog.at_level("INFO"):
        shelves = Shelf(library, mesh, ("model",)), Shelf(library, mesh, (lambda: "a closure",))
    assert "not kept whole: ZeroDivisionError" in caplog.text
    for shelf in shelves:
        assert run_on(shelf.compile("key", lowered(mesh)), mesh)
        assert shelf.find("key") is None
    assert list((tmp_path / "programs").iterdir()) == []
    assert not library.in_memory


def test_sources_that_have_changed_meanwhile_leave_no_program(tmp_path, monkeypatch):
    mesh = mesh_of(HERE)
    changed = dataclasses.replace(program_library.identity.SOURCES, states={tmp_path / "gone.py": (0, 0)})
    monkeypatch.setattr(program_library.identity, "SOURCES", changed)
    programs_in(tmp_path, mesh).get(("a",), lambda: lowered(mesh))
    assert list((tmp_path / "programs").iterdir()) == []
