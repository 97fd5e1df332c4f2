"""The demo's text: a split by paths alone, manifests that notice another library, dialogues in the chat format."""

import ast
from pathlib import Path, PurePosixPath

import pytest

from tools.demo import corpus
from tools.demo.dialogues import load_template, make_dialogues
from tools.demo.train import FOLDER


def write(root: Path, path: str, text: str | bytes) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(text.encode() if isinstance(text, str) else text)


@pytest.fixture
def heldout_path() -> str:
    return next(f"m{i}.py" for i in range(10_000) if corpus.is_heldout(PurePosixPath(f"m{i}.py")))


def test_other_files_do_not_move_a_file_between_the_splits(tmp_path, heldout_path):
    write(tmp_path, heldout_path, "held = 1")
    write(tmp_path, "train.py", "x = 1")
    before = corpus.read_corpus(tmp_path)
    write(tmp_path, "a/another.py", "y = 2")
    after = corpus.read_corpus(tmp_path)
    assert [str(file.path) for file in after[1]] == [heldout_path] == [str(file.path) for file in before[1]]
    assert {str(file.path) for file in after[0]} == {"train.py", "a/another.py"}


def test_a_copy_of_a_held_out_file_is_not_trained_on(tmp_path, heldout_path):
    write(tmp_path, heldout_path, "secret = 1")
    write(tmp_path, "copy.py", "secret = 1")
    assert corpus.read_corpus(tmp_path)[0] == []


@pytest.mark.parametrize(
    ("path", "text"),
    [(path, "x = 1") for path in ("site-packages/a.py", "test/__pycache__/a.py", "encodings/cp1252.py", "a.txt")]
    + [("_sysconfigdata_linux.py", "x = 1"), ("empty.py", "\n"), ("latin.py", b"# \xe9\n")],
)
def test_what_is_not_the_librarys_own_code_in_utf8_stays_out(tmp_path, path, text):
    write(tmp_path, path, text)
    assert corpus.read_corpus(tmp_path) == ([], [])


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
