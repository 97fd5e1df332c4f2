"""Finding a model: bundled, local, or downloaded by the real huggingface_hub code from a hub on the loopback."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from dsjax.checkpoint.hub import ModelNotFoundError, resolve, resolve_config
from dsjax.config import load_config
from dsjax.errors import UserError

COMMIT = "c0ffee" + "0" * 34


def in_a_process(tmp_path, code, **environment):
    """huggingface_hub reads its settings when it is imported, so each case is a process of its own."""
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "*",
        **environment,
    }
    env.pop("HF_TOKEN", None)
    prelude = "from dsjax.checkpoint.hub import resolve\nfrom dsjax.errors import UserError\n"
    run = subprocess.run(
        [sys.executable, "-c", prelude + code], env=env, capture_output=True, text=True, check=False, timeout=240
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


MESSAGE = """
try:
    resolve({model!r}, revision={revision!r})
except UserError as error:
    print(error)
"""


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as a snapshot download uses; ``cut`` closes one download in the middle."""

    files: ClassVar[dict[str, bytes]] = {}
    requested: ClassVar[list[tuple[str, str, str | None]]] = []
    cut: ClassVar[list[str]] = []

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        path = self.path.split("?")[0]
        self.requested.append((self.command, path, self.headers.get("Range")))
        if path.startswith("/api/models/acme/tiny/revision/"):
            if path.rsplit("/", 1)[1] not in ("main", "v2", COMMIT):
                self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
                return
            siblings = [{"rfilename": name} for name in self.files]
            self.reply(200, json.dumps({"id": "acme/tiny", "sha": COMMIT, "siblings": siblings}).encode(), {}, body)
        elif path == f"/api/models/acme/tiny/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.files.items()
            ]
            self.reply(200, json.dumps(entries).encode(), {"Content-Type": "application/json"}, body)
        elif path.startswith("/acme/tiny/resolve/"):
            self.send_file(path.rsplit("/", 1)[1], body)
        else:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

    def send_file(self, name, body):
        content = self.files[name]
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        wanted = self.headers.get("Range")
        if wanted and body:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.reply(206, content[start:], headers, body)
        elif body and name in self.cut:
            self.cut.remove(name)
            self.send_response(200)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.close_connection = True
        else:
            self.reply(200, content, headers, body)

    def reply(self, status, content, headers, body):
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    Hub.files = {
        "config.json": b"{}",
        "model.safetensors": os.urandom(300_000),
        "tokenizer.json": b"{}",
        "pytorch_model.bin": b"pickle",
        "modeling.py": b"code",
    }
    Hub.requested, Hub.cut = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_directory_is_itself_and_has_no_revisions(tmp_path):
    assert resolve(tmp_path) == tmp_path
    with pytest.raises(ModelNotFoundError, match="has no revisions"):
        resolve(tmp_path, revision="main")


@pytest.mark.parametrize("find", [resolve, resolve_config])
def test_a_bundled_model_has_no_revisions_either(find):
    with pytest.raises(ModelNotFoundError, match="demo is bundled, which has no revisions; leave --revision out"):
        find("demo", revision="main")


def test_a_name_that_is_nothing_lists_what_there_is():
    with pytest.raises(ModelNotFoundError, match=r"not a bundled name \(.*deepseek-v3.*not a Hugging Face repository"):
        resolve("no such model")


@pytest.mark.parametrize("find", [resolve, load_config])
def test_the_home_of_a_user_that_there_is_not_is_no_directory(find):
    with pytest.raises(UserError, match="no model"):
        find("~nobody-of-this-name/model")


def test_a_bundled_configuration_without_weights_says_what_it_is_good_for():
    with pytest.raises(ModelNotFoundError, match="bundled as a configuration without weights"):
        resolve("deepseek-v3")


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "the download failed"),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
    ],
)
def test_without_a_network_the_message_says_what_was_tried_and_what_to_do(tmp_path, environment, reason):
    message = in_a_process(tmp_path, MESSAGE.format(model="acme/tiny", revision=None), **environment)
    assert message.startswith("cannot download acme/tiny (revision main)")
    assert reason in message
    assert "give their directory with --model" in message


def test_weights_configuration_and_tokenizer_are_downloaded_once_and_nothing_else(tmp_path, hub):
    first = in_a_process(tmp_path, "print(resolve('acme/tiny', revision='v2'))", HF_ENDPOINT=hub)
    directory = Path(first)
    assert {path.name for path in directory.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert (directory / "model.safetensors").read_bytes() == Hub.files["model.safetensors"]
    assert ("GET", "/api/models/acme/tiny/revision/v2", None) in Hub.requested
    assert not [path for _, path, _ in Hub.requested if path.endswith((".bin", ".py"))]
    Hub.requested.clear()
    assert in_a_process(tmp_path, "print(resolve('acme/tiny', revision='v2'))", HF_ENDPOINT=hub) == first
    assert not [path for method, path, _ in Hub.requested if method == "GET" and "/resolve/" in path]
    assert in_a_process(tmp_path, "print(resolve('acme/tiny', revision='v2'))", HF_HUB_OFFLINE="1") == first


def test_an_interrupted_download_goes_on_where_it_stopped(tmp_path, hub):
    # huggingface_hub writes in runs of 10 MB: half of 24 MB leaves the first of them.
    Hub.files["model.safetensors"] = os.urandom(24_000_000)
    Hub.cut.append("model.safetensors")
    code = """
try:
    print(resolve("acme/tiny"))
except UserError:
    print(resolve("acme/tiny"))
"""
    directory = Path(in_a_process(tmp_path, code, HF_ENDPOINT=hub))
    assert (directory / "model.safetensors").read_bytes() == Hub.files["model.safetensors"]
    ranges = [wanted for _, path, wanted in Hub.requested if path.endswith("model.safetensors") and wanted]
    assert ranges
    assert int(ranges[-1].removeprefix("bytes=").split("-")[0]) > 0


@pytest.mark.parametrize(
    ("model", "revision", "expected"),
    [("acme/tiny", "nowhere", "has no revision 'nowhere'"), ("acme/other", None, "no repository acme/other")],
)
def test_a_repository_or_revision_that_does_not_exist(tmp_path, hub, model, revision, expected):
    message = in_a_process(tmp_path, MESSAGE.format(model=model, revision=revision), HF_ENDPOINT=hub)
    assert expected in message


def test_an_empty_name_is_no_model_and_not_the_current_folder():
    with pytest.raises(ModelNotFoundError, match="no model ''"):
        resolve("")
