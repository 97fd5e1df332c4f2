"""The cluster key: as it is given, as it is made for this user, and that nobody else reads it."""

import os
import pickle
import stat
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dsjax.errors import UserError
from dsjax.messaging import cluster_key
from dsjax.messaging.cluster_key import ClusterKey, given_key, local_key, read_credentials

TEXT = "0123456789abcdef" * 4


def shown(key: ClusterKey) -> bytes:
    return key.mac("shown")


def test_a_key_is_read_from_a_file_or_the_environment_and_the_file_comes_first(tmp_path):
    file = tmp_path / "key"
    file.write_text(f"{TEXT}\n")
    variables = {"DSJAX_CLUSTER_KEY": TEXT[::-1]}
    assert shown(given_key(str(file), variables)) == shown(ClusterKey(TEXT, "")) != shown(given_key(None, variables))
    assert given_key(None, variables).source == "the environment variable DSJAX_CLUSTER_KEY"
    assert given_key(None, {}) is None


def test_a_variable_whose_bytes_are_no_text_is_named():
    with pytest.raises(UserError, match="environment variable DSJAX_CLUSTER_KEY is no text in UTF-8"):
        given_key(None, {"DSJAX_CLUSTER_KEY": os.fsdecode(b"\xff" * 40)})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; give at least 32 characters"),
        (TEXT[:31], "has 31 characters, expected 32 to 4,096"),
        (TEXT + "\n" + TEXT, "has spaces or several lines"),
    ],
)
def test_a_key_that_is_none_is_refused_and_not_shown(tmp_path, text, message):
    file = tmp_path / "key"
    file.write_text(text)
    for given in (lambda: given_key(str(file), {}), lambda: given_key(None, {"DSJAX_CLUSTER_KEY": text})):
        with pytest.raises(UserError, match=message) as error:
            given()
        assert TEXT[:31] not in str(error.value)


@pytest.mark.parametrize("content", [None, b"\xff" * 40])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(UserError, match=r"^--cluster-key-file: '.*key' cannot be read: "):
        given_key(str(tmp_path / "key"), {})


def test_a_file_that_everybody_can_read_is_told_of(tmp_path, caplog):
    file = tmp_path / "key"
    file.write_text(TEXT)
    file.chmod(0o644)
    given_key(str(file), {})
    assert "Every user of this host can read the cluster key" in caplog.text
    assert TEXT not in caplog.text


def test_a_key_can_be_neither_shown_nor_written_down():
    key = ClusterKey(TEXT, "a test")
    assert repr(key) == "ClusterKey(source='a test')"
    assert TEXT not in repr(cluster_key.Credentials(key))
    with pytest.raises(TypeError, match="not written down"):
        pickle.dumps(key)


def test_all_that_start_at_once_make_one_key(tmp_path):
    """Threads do what processes would: which of their links to the file wins is for the kernel to say."""
    variables, barrier = {"XDG_RUNTIME_DIR": str(tmp_path)}, threading.Barrier(16)

    def make(_: int) -> bytes:
        barrier.wait(60)
        return shown(local_key(variables))

    with ThreadPoolExecutor(16) as pool:
        keys = list(pool.map(make, range(16)))
    assert len(set(keys)) == 1 == len({*keys, shown(local_key(variables))})
    (file,) = (tmp_path / "dsjax").iterdir()
    assert file.name == "cluster-key"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent)] == [0o600, 0o700]


def test_the_key_lies_in_the_first_folder_that_is_this_users_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_key.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    runtime, home = tmp_path / "runtime", tmp_path / "home"
    for path in (runtime, home, tmp_path / "temporary"):
        path.mkdir()
    variables = {"XDG_RUNTIME_DIR": str(runtime), "HOME": str(home)}
    assert local_key(variables).source == f"the file {runtime}/dsjax/cluster-key"
    (runtime / "dsjax").chmod(0o755)
    assert local_key(variables).source == f"the file {home}/.cache/dsjax-cluster/cluster-key"
    (home / ".cache").rename(home / "elsewhere")
    (home / ".cache").write_text("a file is no folder")
    own = tmp_path / "temporary" / f"dsjax-{os.geteuid()}"
    assert local_key(variables).source == f"the file {own}/cluster-key"
    own.symlink_to(own.rename(tmp_path / "foreign"))  # as another user may put there
    with pytest.raises(UserError, match=r"others can read it \(mode 0755\).*give one with --cluster-key-file FILE"):
        local_key(variables)


def test_a_folder_of_another_user_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "dsjax").mkdir(mode=0o700)
    monkeypatch.setattr(cluster_key, "_folders", lambda environment: [str(tmp_path / "dsjax")])
    monkeypatch.setattr(cluster_key.os, "geteuid", lambda: 12345678)
    with pytest.raises(UserError, match=r"it belongs to another user"):
        local_key({})


@pytest.mark.parametrize("spoil", [lambda file: file.write_text("abc"), lambda file: file.chmod(0o644)])
def test_what_lies_where_the_key_should_is_not_believed(tmp_path, spoil):
    variables = {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": ""}
    local_key(variables)
    spoil(tmp_path / "dsjax" / "cluster-key")
    with pytest.raises(UserError, match=r"cluster-key .*delete it"):
        local_key(variables)


def test_only_the_loopback_interface_needs_no_key(monkeypatch):
    monkeypatch.delenv("DSJAX_CLUSTER_KEY", raising=False)
    assert read_credentials(None, "127.0.0.1", "localhost", "127.8.9.1", "::1").key.is_local
    for host in ("192.0.2.1", "0.0.0.0", "::", "", "no-such-host.invalid"):
        with pytest.raises(UserError, match="--cluster-key-file FILE or in the environment variable DSJAX_CLUSTER_"):
            read_credentials(None, "127.0.0.1", host)
    monkeypatch.setenv("DSJAX_CLUSTER_KEY", TEXT)
    assert not read_credentials(None, "192.0.2.1").key.is_local
    monkeypatch.setenv("DSJAX_CLUSTER_KEY", "")
    with pytest.raises(UserError, match="is empty"):  # and not "no key"
        read_credentials(None, "127.0.0.1")
