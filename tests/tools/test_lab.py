"""The crowd of `tools/lab.py`: which answers are lost and which are wrong; and how a silence is divided."""

import argparse
import asyncio
import itertools
import json
import sys

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tools.lab import LABS, main
from tools.labs.crowd import Crowd
from tools.labs.hosts import Hosts

RUNNING = argparse.Namespace(poll=lambda: None)


def arguments(**changed) -> argparse.Namespace:
    return argparse.Namespace(**{"seed": 0, "patience": 60.0, "progress": 60.0, "tokens": 4, "json": None} | changed)


class Asks(Crowd):
    """One session, disturbed for as long as `count` requests take."""

    count = 3

    def draw_requests(self) -> list[dict]:
        return [self.request(0, (2, 3), [{"temperature": 0}])]

    async def disturb(self) -> None:
        await self.until(lambda: self.answers + len(self.lost) >= self.count)


async def crowd_of(answers: list[list[str]], **changed) -> dict[str, object]:
    """What a crowd finds of a server whose first, second … answer has these lines; the last one is repeated."""
    given = itertools.chain(answers, itertools.repeat(answers[-1]))

    async def complete(request: web.Request) -> web.Response:
        text = "".join(f"data: {line}\n\n" for line in next(given))
        return web.Response(text=text, content_type="text/event-stream")

    async def load(request: web.Request) -> web.Response:
        return web.json_response({"ranks": [{"used_pages": 2}, {"used_pages": 1}]})

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete), web.get("/get_load", load)])
    async with TestServer(app) as server:
        processes = argparse.Namespace(processes=[RUNNING])
        return await Asks(arguments(**changed), processes, f"http://127.0.0.1:{server.port}").run()


def text(word: str) -> str:
    return json.dumps({"choices": [{"text": word}]})


GOOD = [text("a"), text("b"), "[DONE]"]


def test_equal_answers_are_neither_lost_nor_wrong_and_another_text_is_wrong():
    found = asyncio.run(crowd_of([GOOD]))
    assert (found["lost"], found["wrong"], found["pages_left"]) == (0, 0, 3)
    assert found["answers"] >= 3
    found = asyncio.run(crowd_of([GOOD, GOOD, [text("a"), text("c"), "[DONE]"], GOOD]))
    assert (found["lost"], found["wrong"]) == (0, 1)


@pytest.mark.parametrize("broken", [[text("a"), text("b")], [text("a"), json.dumps({"error": {"message": "gone"}})]])
def test_a_stream_without_an_end_and_one_with_an_error_are_lost(broken, tmp_path):
    file = tmp_path / "found.json"
    found = asyncio.run(crowd_of([GOOD, broken, GOOD], json=file))
    assert (found["lost"], found["wrong"]) == (1, 0)
    assert json.loads(file.read_text()) == found


def test_a_silence_is_divided_by_the_log_of_the_last_change():
    log = (
        "before\nGeneration 2 has dp=2 on processes 0 1. No step computed for 9.0 s: loading 9.0 s.\n"
        "Generation 3 has dp=3 on processes 0 1 2. No step computed for 4.5 s: looking 0.5 s, loading 1.0 s, compiling 3.0 s.\n"
    )
    processes = argparse.Namespace(processes=[RUNNING], output=[log])
    hosts = Hosts(arguments(sessions=1), processes, "http://nowhere")
    parts = hosts.parts(len("before\n"), 7.0, begun=2.0)
    assert parts == {"noticing": 1.5, "looking": 0.5, "loading": 1.0, "compiling": 3.0, "rest": 1.0}


@pytest.mark.parametrize("name", LABS)
def test_every_lab_says_what_it_does(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lab.py", name, "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert f"usage: lab.py {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hosts", "--between", "1,2"], "--signal CUT"),
        (["hosts", "--model", "m", "--checkpoint-gb", "1"], "give one of them"),
        (["experts", "--processes", "0"], "--losses 0"),
        (["experts", "--at-once", "2"], "2 of 1 processes"),
    ],
)
def test_options_that_contradict_each_other_are_refused(words, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lab.py", *words])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit, match=message):
        main()
