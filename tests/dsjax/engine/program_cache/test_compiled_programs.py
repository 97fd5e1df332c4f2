"""An executor's programs: each is compiled once, by one process of a host, and what another one compiles is waited for and loaded."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from small_programs import lowered, mesh_of, never_lowered, programs_in, run_on

from dsjax.engine.program_cache import compiled_programs

SILENT = (lambda *said: None, lambda key: None)
"""Tell nobody what is compiled, and do nothing after it."""


def test_an_executor_that_finds_all_its_programs_traces_none(tmp_path):
    mesh, reports = mesh_of([0, 1, 2, 3]), []
    for lower in (lambda key: lowered(mesh), lambda key: never_lowered()):
        programs = programs_in(tmp_path, mesh, lower)
        programs.compile_all({("a",): "a", ("b",): "b"}, lambda *said: reports.append(said), lambda key: None)
        assert run_on(programs.get(("a",), never_lowered), mesh)
    assert reports[-1] == (2, 2, "all")


def in_threads(*works) -> None:
    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()


@pytest.mark.parametrize("end", ["without a program", "not at all"])
def test_a_turn_that_ends_without_a_program_or_not_at_all_is_another_ones(tmp_path, monkeypatch, end):
    mesh = mesh_of([0, 1, 2, 3])
    first, second = programs_in(tmp_path, mesh), programs_in(tmp_path, mesh)
    turn = first.shelf.turn(("a",))
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

    labels = {(name,): name for name in "abcdef"}
    both = [programs_in(tmp_path, mesh, lower) for _ in range(2)]
    seen = [[], []]
    in_threads(
        *(
            lambda one=one, said=said: one.compile_all(labels, lambda *what: said.append(what), lambda key: None)
            for one, said in zip(both, seen, strict=True)
        )
    )
    assert sorted(traced) == sorted(labels), "each program once"
    for one, said in zip(both, seen, strict=True):
        assert set(one.compiled) == set(labels)
        assert said[-1][:2] == (6, 6)
    assert [path for path in (tmp_path / "programs").iterdir() if path.suffix != ".program"] == []


def test_an_interrupt_gives_back_all_turns(tmp_path):
    mesh = mesh_of([0, 1, 2, 3])

    def stop_at_the_second(key):
        if key == ("b",):
            raise KeyboardInterrupt
        return lowered(mesh)

    labels = {("a",): "a", ("b",): "b"}
    with pytest.raises(KeyboardInterrupt):
        programs_in(tmp_path, mesh, stop_at_the_second).compile_all(labels, *SILENT)
    later = programs_in(tmp_path, mesh)
    later.compile_all(labels, *SILENT)
    assert set(later.compiled) == set(labels)


def test_a_process_that_was_stopped_with_many_turns_is_waited_for_once(tmp_path, monkeypatch):
    mesh, labels, clock = mesh_of([0, 1, 2, 3]), {(name,): name for name in "abcd"}, [0.0]
    stopped, later = programs_in(tmp_path, mesh), programs_in(tmp_path, mesh)
    turns = [stopped.shelf.turn(key) for key in labels]

    def sleep(seconds):
        clock[0] += compiled_programs._PATIENCE / 8

    monkeypatch.setattr(compiled_programs, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    later.compile_all(labels, *SILENT)
    assert set(later.compiled) == set(labels)
    assert clock[0] < 1.5 * compiled_programs._PATIENCE
    assert None not in turns
