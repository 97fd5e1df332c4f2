"""An executor's programs: each is compiled once, by one process of a host, and what another one compiles is waited for and loaded."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from small_programs import lowered, mesh_of, never_lowered, programs_in, run_on

from dsjax.engine.program_cache import compiled_programs


def test_an_executor_that_finds_all_its_programs_traces_none(tmp_path):
    mesh, tell = mesh_of([0, 1, 2, 3]), Mock()
    for lower in (lambda key: lowered(mesh), lambda key: never_lowered()):
        programs = programs_in(tmp_path, mesh, lower)
        programs.compile_all({("a",): "a", ("b",): "b"}, tell, Mock())
        assert run_on(programs.get(("a",), never_lowered), mesh)
    assert tell.call_args.args == (2, 2, "all")


def in_threads(*works) -> None:
    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()


@pytest.mark.parametrize("end", ["without a program", "not at all"])
def test_a_turn_that_ends_without_a_program_or_not_at_all_is_another_ones(tmp_path, monkeypatch, end):
    mesh = mesh_of([0, 1, 2, 3])
    first, second = programs_in(tmp_path, mesh), programs_in(tmp_path, mesh)
    turn = first.shelf.compile_lock(("a",))
    if end == "not at all":
        monkeypatch.setattr(compiled_programs, "_PATIENCE", 0.2)
        second.get(("a",), lambda: lowered(mesh))
    else:
        in_threads(lambda: (time.sleep(0.3), turn.close()), lambda: second.get(("a",), lambda: lowered(mesh)))
    assert run_on(second.compiled["a",], mesh)
    turn.close()


def test_processes_that_start_together_share_the_work(tmp_path):
    mesh, traced = mesh_of([0, 1, 2, 3]), []

    def lower(key):
        traced.append(key)
        return lowered(mesh)

    labels, said = {(name,): name for name in "abcdef"}, [Mock(), Mock()]
    both = [programs_in(tmp_path, mesh, lower) for _ in said]
    in_threads(*(partial(one.compile_all, labels, tell, Mock()) for one, tell in zip(both, said, strict=True)))
    assert sorted(traced) == sorted(labels), "each program once"
    for one, tell in zip(both, said, strict=True):
        assert set(one.compiled) == set(labels)
        assert tell.call_args.args[:2] == (6, 6)
    assert [path for path in (tmp_path / "programs").iterdir() if path.suffix != ".program"] == []


def test_an_interrupt_gives_back_all_turns(tmp_path):
    mesh, labels = mesh_of([0, 1, 2, 3]), {("a",): "a", ("b",): "b"}
    stop_at_the_second = Mock(side_effect=[lowered(mesh), KeyboardInterrupt])
    with pytest.raises(KeyboardInterrupt):
        programs_in(tmp_path, mesh, stop_at_the_second).compile_all(labels, Mock(), Mock())
    later = programs_in(tmp_path, mesh)
    later.compile_all(labels, Mock(), Mock())
    assert set(later.compiled) == set(labels)


def test_a_process_that_was_stopped_with_many_turns_is_waited_for_once(tmp_path, monkeypatch):
    mesh, labels, clock = mesh_of([0, 1, 2, 3]), {(name,): name for name in "abcd"}, [0.0]
    stopped, later = programs_in(tmp_path, mesh), programs_in(tmp_path, mesh)
    turns = [stopped.shelf.compile_lock(key) for key in labels]

    def sleep(seconds):
        clock[0] += compiled_programs._PATIENCE / 8

    monkeypatch.setattr(compiled_programs, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    later.compile_all(labels, Mock(), Mock())
    assert set(later.compiled) == set(labels)
    assert clock[0] < 1.5 * compiled_programs._PATIENCE
    assert None not in turns
