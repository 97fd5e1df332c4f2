"""Finding a model: bundled, local, or downloaded by the real huggingface_hub code from a hub on the loopback."""

import functools
import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from dsjax.checkpoint.hub import ModelNotFoundError, resolve, resolve_config
from dsjax.config import load_config
from dsjax.errors import UserError

COMMIT = "c0ffee" + "0" * 34


def in_a_process(tmp_path, code, **environment):
    """huggingface_hub reads its settings when it is imported, so each case is a process of its own."""
    settings = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "*"}
    env = os.environ | settings | {"HF_HOME": str(tmp_path / "hub")} | environment
    env.pop("HF_TOKEN", None)
    code = f"from dsjax.checkpoint.hub import resolve\nfrom dsjax.errors import UserError\n{code}"
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


MESSAGE = """
try:
    resolve({model!r}, revision={revision!r})
except UserError as error:
    print(error)
"""


class Hub(SimpleHTTPRequestHandler):
    """Files below a folder, as the hub serves them to a snapshot download."""

    requested: ClassVar[list[tuple[str, str]]] = []

    def send_head(self):
        self.requested.append((self.command, self.path.split("?")[0]))
        return super().send_head()

    def end_headers(self):
        self.send_header("ETag", f'"{hashlib.sha256(self.path.encode()).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        super().end_headers()

    def send_error(self, code, *_):
        self.send_response(code)
        known = self.path.startswith("/api/models/acme/tiny/")
        self.send_header("X-Error-Code", "RevisionNotFound" if known else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


FILES = {"config.json": b"{}", "model.safetensors": os.urandom(300_000), "tokenizer.json": b"{}"}
NOT_WANTED = {"pytorch_model.bin": b"pickle", "modeling.py": b"code"}


@pytest.fixture
def hub(tmp_path_factory):
    folder, files = tmp_path_factory.mktemp("hub"), FILES | NOT_WANTED
    tree = [{"type": "file", "path": name, "size": len(files[name]), "oid": name} for name in files]
    info = {"id": "acme/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
    served = {f"acme/tiny/resolve/{COMMIT}/{name}": content for name, content in files.items()}
    served["api/models/acme/tiny/revision/v2"] = json.dumps(info).encode()
    served[f"api/models/acme/tiny/tree/{COMMIT}"] = json.dumps(tree).encode()
    for path, content in served.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    Hub.requested.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Hub, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("find", [resolve, resolve_config])
def test_a_directory_is_itself_and_neither_it_nor_a_bundled_model_has_revisions(find, tmp_path):
    assert resolve(tmp_path) == tmp_path
    with pytest.raises(ModelNotFoundError, match="has no revisions"):
        resolve(tmp_path, revision="main")
    with pytest.raises(ModelNotFoundError, match="demo is bundled, which has no revisions; leave --revision out"):
        find("demo", revision="main")


def test_a_name_that_is_nothing_lists_what_there_is():
    with pytest.raises(ModelNotFoundError, match=r"not a bundled name \(.*deepseek-v3.*not a Hugging Face repository"):
        resolve("no such model")
    with pytest.raises(ModelNotFoundError, match="bundled as a configuration without weights"):
        resolve("deepseek-v3")
    with pytest.raises(ModelNotFoundError, match="no model ''"):
        resolve("")
    for find in (resolve, load_config):
        with pytest.raises(UserError, match="no model"):
            find("~nobody-of-this-name/model")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [("HF_ENDPOINT", "http://127.0.0.1:9", "the download failed"), ("HF_HUB_OFFLINE", "1", "HF_HUB_OFFLINE is set")],
)
def test_without_a_network_the_message_says_what_was_tried_and_what_to_do(tmp_path, name, value, reason):
    message = in_a_process(tmp_path, MESSAGE.format(model="acme/tiny", revision=None), **{name: value})
    assert message.startswith("cannot download acme/tiny (revision main)")
    assert reason in message
    assert "give their directory with --model" in message


@pytest.mark.slow
def test_weights_configuration_and_tokenizer_are_downloaded_once_and_nothing_else(tmp_path, hub):
    find = "print(resolve('acme/tiny', revision='v2'))"
    first = in_a_process(tmp_path, find, HF_ENDPOINT=hub)
    assert {path.name: path.read_bytes() for path in Path(first).iterdir()} == FILES
    assert ("GET", "/api/models/acme/tiny/revision/v2") in Hub.requested
    assert not [path for _, path in Hub.requested if path.endswith((".bin", ".py"))]
    Hub.requested.clear()
    assert in_a_process(tmp_path, find, HF_ENDPOINT=hub) == first
    assert not [path for method, path in Hub.requested if method == "GET" and "/resolve/" in path]
    assert in_a_process(tmp_path, find, HF_HUB_OFFLINE="1") == first


@pytest.mark.parametrize(
    ("model", "revision", "expected"),
    [("acme/tiny", "nowhere", "has no revision 'nowhere'"), ("acme/other", None, "no repository acme/other")],
)
def test_a_repository_or_revision_that_does_not_exist(tmp_path, hub, model, revision, expected):
    message = in_a_process(tmp_path, MESSAGE.format(model=model, revision=revision), HF_ENDPOINT=hub)
    assert expected in message
