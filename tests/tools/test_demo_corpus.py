"""The demo's text: a split by paths alone, manifests that notice another library, dialogues in the chat format."""

import ast
from pathlib import PurePosixPath

import pytest

from tools.demo import corpus
from tools.demo.dialogues import load_template, make_dialogues
from tools.demo.train import FOLDER

HELD_OUT = next(f"m{i}.py" for i in range(10_000) if corpus.is_heldout(PurePosixPath(f"m{i}.py")))


@pytest.fixture
def splits(tmp_path):
    """Names of the files to train on and of those that are held out, once these are written as well."""

    def make(files: dict[str, bytes]) -> list[set[str]]:
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_bytes(text)
        return [{str(file.path) for file in split} for split in corpus.read_corpus(tmp_path)]

    return make


def test_other_files_do_not_move_a_file_between_the_splits_and_a_copy_of_a_held_out_one_is_in_none(splits):
    assert splits({HELD_OUT: b"held = 1", "train.py": b"x = 1", "copy.py": b"held = 1"}) == [{"train.py"}, {HELD_OUT}]
    assert splits({"a/another.py": b"y = 2"}) == [{"train.py", "a/another.py"}, {HELD_OUT}]


@pytest.mark.parametrize(
    ("path", "text"),
    [(path, b"x = 1") for path in ("site-packages/a.py", "test/__pycache__/a.py", "encodings/cp1252.py", "a.txt")]
    + [("_sysconfigdata_linux.py", b"x = 1"), ("empty.py", b"\n"), ("latin.py", b"# \xe9\n")],
)
def test_what_is_not_the_librarys_own_code_in_utf8_stays_out(splits, path, text):
    assert splits({path: text}) == [set(), set()]


def test_the_manifests_name_no_file_twice_and_hold_out_at_least_half_a_megabyte_of_files():
    train, heldout = corpus.read_manifest("train"), corpus.read_manifest("heldout")
    assert train.keys().isdisjoint(heldout)
    assert all(corpus.is_heldout(PurePosixPath(path)) for path in heldout)
    assert not any(corpus.is_heldout(PurePosixPath(path)) for path in train)
    assert 0.02 < len(heldout) / len(train) < 0.05


def test_dialogues_think_then_answer_with_the_function_itself():
    source = "".join(f'def f{i}(a, b):\n    """Do thing {i}."""\n    return a + {i}\n\n' for i in range(64))
    dialogues = make_dialogues([corpus.SourceFile(PurePosixPath("m.py"), source.encode())], load_template(FOLDER))
    assert 4 <= len(dialogues) <= 32, "about one function in four"
    for text in dialogues:
        prompt, answer = text.split("</think>\n\n")
        assert prompt.startswith("<｜begin▁of▁sentence｜>")
        assert "<｜User｜>" in prompt
        assert "<｜Assistant｜><think>\n" in prompt
        code = answer.removeprefix("```python\n").removesuffix("\n```<｜end▁of▁sentence｜>")
        assert isinstance(ast.parse(code).body[0], ast.FunctionDef)
