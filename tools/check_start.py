"""Start dsjax under each of the broken conditions that a machine can be in: a start that says what it does without, or a refusal.

    python tools/check_start.py                    # all of them, about five minutes on two busy cores
    python tools/check_start.py disk               # those with "disk" in their names
    python tools/check_start.py --json found.json

Each condition is a process of its own, `dsjax generate` or `dsjax serve`. Those that start have to give the tokens of a whole machine, and
those that do not have to end with an error in one line; neither may print a traceback. Conditions with file systems of their own (full,
read-only) need `unshare --map-root-user --mount`, and are left out where the system does not let this user have it.

It prints a table in Markdown. `--json FILE` writes a list of `{"condition", "outcome", "said", "seconds", "ok"}`. Exits 1 if a condition
does not end as it should.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / part) for part in ("", "dsjax/hosts"))]
from tools.labs.servers import complete

SIZES = ("--mesh", "dp=2", "--cache-tokens", "512", "--max-num-seqs", "2")
GENERATE = ("generate", *SIZES, "--prompt", "def main(", "--max-tokens", "6")
SERVE = ("serve", *SIZES, "--port", "0")
SECONDS = 180
MOUNTS = ("--map-root-user", "--mount")
_URL = re.compile(r"serving demo at (http://\S+)/v1")


@dataclass(frozen=True)
class Condition:
    """One broken condition.

    Attributes:
        says: what the output has to hold. starts: whether it is to start.
        prepare: given an empty folder, makes the condition there and gives changes of the environment, where None unsets.
        shell: run before the command, in its shell. unshare: what that shell has of its own, as `unshare` takes it.
    """

    name: str
    says: str
    starts: bool = True
    command: tuple[str, ...] = GENERATE
    options: Callable[[Path], tuple[str, ...]] = lambda folder: ()
    prepare: Callable[[Path], Mapping[str, str | None]] = lambda folder: {}
    shell: str = ":"
    unshare: tuple[str, ...] = ()


def in_the_way(folder: Path) -> dict[str, str | None]:
    """A file where the folder for compiled programs should be."""
    (folder / "file").touch()
    return {"JAX_COMPILATION_CACHE_DIR": str(folder / "file" / "compiled")}


def shared(folder: Path) -> dict[str, str | None]:
    """A folder for compiled programs that everybody can write to."""
    (folder / "shared").mkdir()
    (folder / "shared").chmod(0o777)
    return {"JAX_COMPILATION_CACHE_DIR": str(folder / "shared")}


def cut_library(folder: Path) -> dict[str, str | None]:
    """A native library that was cut after it had worked."""
    from dsjax.engine.device.process import cache_folder

    for path in (cache_folder() / "native").glob("*"):
        (folder / "native").mkdir(exist_ok=True)
        shutil.copy(path, folder / "native")
        if path.suffix == ".so":
            (folder / "native" / path.name).write_bytes(path.read_bytes()[:5000])
    return {"JAX_COMPILATION_CACHE_DIR": str(folder)}


def broken_compiler(folder: Path) -> dict[str, str | None]:
    """A compiler that fails."""
    (folder / "c++").write_text("#!/bin/sh\necho 'error: broken' >&2; exit 1\n")
    (folder / "c++").chmod(0o755)
    return {"CXX": str(folder / "c++"), "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}


def long_path(folder: Path) -> dict[str, str | None]:
    """A folder for temporary files whose path is too long for a socket."""
    long = folder / ("long" * 30)
    long.mkdir()
    return {"TMPDIR": str(long)}


def foreign(folder: Path) -> dict[str, str | None]:
    """A folder with somebody else's files."""
    (folder / "pages").mkdir()
    (folder / "pages" / "report.writing").write_text("a chapter")
    return {}


def disk(*parts: str) -> Callable[[Path], tuple[str, ...]]:
    """The options of a disk cache, by its path below the condition's folder."""
    return lambda folder: ("--disk-cache", str(folder.joinpath(*parts)), "--disk-cache-bytes", "50000000")


READ_ONLY = "for m in / /tmp /var/tmp /dev/shm $HOME $PWD; do mount --bind $m $m && mount -o remount,bind,ro $m; done 2>/dev/null"

CONDITIONS = (
    Condition("nothing is broken", "def main("),
    Condition("no HOME, and none among the system's users", "there is no home folder", unshare=("--map-user=54321",),
              prepare=lambda _: {"HOME": None, "XDG_CACHE_HOME": None, "JAX_COMPILATION_CACHE_DIR": None}),
    Condition("HOME does not exist and cannot be made", "will not be kept: cannot write", prepare=lambda folder: in_the_way(folder) | {
        "HOME": str(folder / "file" / "home"), "XDG_CACHE_HOME": None, "JAX_COMPILATION_CACHE_DIR": None}),
    Condition("compiled programs: a file is in the way", "will not be kept: cannot write", prepare=in_the_way),
    Condition("compiled programs: others can write there", "others can write to", prepare=shared),
    Condition("native library: cut", "def main(", prepare=cut_library),
    Condition("native library: cut, and asked for by name", "--kernels is native, but the native kernels in", False,
              options=lambda _: ("--kernels", "native"), prepare=cut_library),
    Condition("native library: the compiler fails", "def main(", prepare=broken_compiler),
    Condition("temporary folder: missing", "def main(", prepare=lambda folder: {"TMPDIR": str(folder / "missing")}),
    Condition("temporary folder: a path too long for a socket, 2 front ends", "serving demo", command=SERVE,
              options=lambda _: ("--api-server-count", "2"), prepare=long_path),
    Condition("open files: 64, 2 front ends", "about 16 clients can be connected", command=SERVE,
              options=lambda _: ("--api-server-count", "2"), shell="ulimit -n 64"),
    Condition("open files: 64, 32 devices", "def main(", command=(*GENERATE[:2], "dp=32", *GENERATE[3:]), shell="ulimit -n 64"),
    Condition("open files: 40, 4 front ends", "files and connections open at a time", False, SERVE,
              lambda _: ("--api-server-count", "4"), shell="ulimit -n 40"),
    Condition("disk cache: somebody else's files", "holds files that are not dsjax's (report.writing)", False,
              options=disk("pages"), prepare=foreign),
    Condition("disk cache: others can write there", "others can write to it", False, options=disk("shared"), prepare=shared),
    Condition("disk cache: a file is in the way", "cannot be used as a folder for pages", False, options=disk("file"), prepare=in_the_way),
    Condition("disk cache: no room for a page", "def main(", options=disk("pages"), prepare=lambda folder: (folder / "pages").mkdir() or {},
              shell="mount -t tmpfs -o size=8k,mode=0700 none pages", unshare=MOUNTS),
    Condition("disk cache: read-only", "Read-only file system; give one that this user", False, options=disk("pages"),
              prepare=lambda folder: (folder / "pages").mkdir() or {}, shell="mount -t tmpfs -o ro,mode=0700 none pages", unshare=MOUNTS),
    Condition("everything is read-only", "(Read-only file system)", prepare=lambda _: {"JAX_COMPILATION_CACHE_DIR": None},
              shell=READ_ONLY, unshare=MOUNTS),
    Condition("everything is read-only, 2 front ends", "cannot create a socket", False, SERVE, lambda _: ("--api-server-count", "2"),
              shell=READ_ONLY, unshare=MOUNTS),
    Condition("everything is read-only, dsjax doctor", "trouble", False, ("doctor",),
              prepare=lambda _: {"JAX_COMPILATION_CACHE_DIR": None}, shell=READ_ONLY, unshare=MOUNTS),
    Condition("address: 0.0.0.0", "it stands for all addresses of this host", False,
              options=lambda _: ("--coordinator-address", "0.0.0.0:9", "--num-processes", "2", "--process-id", "0")),
)  # fmt: skip


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="part of a condition's name; default: all")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    wanted = [one for one in CONDITIONS if not args.names or any(name in one.name for name in args.names)]
    if not can_mount():
        print(f"conditions that mount are left out: unshare {shlex.join(MOUNTS)} is not allowed here", file=sys.stderr)
        wanted = [one for one in wanted if one.unshare != MOUNTS]
    expected = run(CONDITIONS[0])["text"]
    print("| condition | outcome | what is said | seconds |\n|---|---|---|---|")
    rows = []
    for one in wanted:
        row = run(one)
        text = row.pop("text")
        row["ok"] = row["outcome"] == ("starts" if one.starts else "refused") and (not one.starts or text == expected)
        rows.append(row)
        print(
            f"| {one.name} | {row['outcome']}{'' if row['ok'] else ', WRONG'} | {row['said']} | {row['seconds']:.0f} |",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0 if rows and all(row["ok"] for row in rows) else 1


def can_mount() -> bool:
    """Whether this user can have file systems of its own."""
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", *MOUNTS, "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(command, capture_output=True).returncode == 0


def run(one: Condition) -> dict:
    """Start a process under a condition, and give how that ended and the text that it made."""
    with tempfile.TemporaryDirectory(prefix="check-start-") as name:
        folder = Path(name)
        environment = dict(os.environ, PYTHONPATH=str(ROOT))
        for variable, value in one.prepare(folder).items():
            environment.pop(variable, None)
            if value is not None:
                environment[variable] = value
        inner = shlex.join([sys.executable, "-m", "dsjax", *one.command, *one.options(folder)])
        command = ["bash", "-c", f"{one.shell}; exec {inner}"]
        if one.unshare:
            command = ["unshare", *one.unshare, *command]
        began = time.monotonic()
        code, output, text = start(command, folder, environment, serves=one.command[0] == "serve")
        line = next((line for line in output.splitlines() if one.says in line), "")
        if "Traceback" in output or not line:
            outcome = f"exit code {code}, " + ("a traceback" if "Traceback" in output else f"without {one.says!r}")
            line = output[-300:]
        else:
            outcome = "starts" if code == 0 else "refused"
        said = " ".join(line.replace(name, "…").replace("|", "/").split())[:200]
        found = {"condition": one.name, "outcome": outcome, "said": said}
        return found | {"seconds": time.monotonic() - began, "text": text}


def start(command: list[str], folder: Path, environment: dict[str, str], serves: bool) -> tuple[int, str, str]:
    """Run a command to its end; a server is asked for a completion first. Give its exit code, all that it wrote, and the text it made."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err, start_new_session=True)
        text, deadline = "", time.monotonic() + SECONDS
        try:
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
                if serves and (url := _URL.search(read(out) + read(err))):
                    text = "def main(" + complete(url[1], "demo", "def main(", 6)  # what `GENERATE` asks for
                    os.killpg(process.pid, signal.SIGTERM)
                    process.wait(30)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said = read(out)
        return process.returncode, said + read(err), text if serves else said.rstrip("\n")


def read(file) -> str:
    """Read all that was written to a file so far."""
    return os.pread(file.fileno(), 1 << 20, 0).decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
