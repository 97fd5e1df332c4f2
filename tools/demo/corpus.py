"""The demo model's text: the source files of the running CPython's own library, split by a hash of their paths.

    python -m tools.demo.corpus --check      # is this machine's library the one that the demo was trained on?
    python -m tools.demo.corpus --write      # record this machine's library as the one that is

The manifests beside this file (`train.sha256`, `heldout.sha256`) are in the format of `sha256sum`, with paths relative
to the library, so `cd LIB && sha256sum --check …/heldout.sha256` says the same without us.
"""

import argparse
import hashlib
import platform
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

FOLDER = Path(__file__).parent
MANIFESTS = {"train": FOLDER / "train.sha256", "heldout": FOLDER / "heldout.sha256"}
HELDOUT_PER_THOUSAND = 25

# Installed packages are not the library; `encodings` and `pydoc_data` are generated tables and generated prose, 2 MB
# that teach nothing about code and would flatter every compressor; `_sysconfigdata*` and `config-*` differ by machine.
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "lib-dynload", "encodings", "pydoc_data"}
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus: its path relative to the library, and its text as bytes (valid UTF-8)."""

    path: PurePosixPath
    content: bytes

    @property
    def digest(self) -> str:
        """SHA-256 of the content, in hexadecimal."""
        return hashlib.sha256(self.content).hexdigest()


def library() -> Path:
    """The folder of the running CPython's library (`Lib` in its source tree)."""
    return Path(sysconfig.get_paths()["stdlib"]).resolve()


def is_heldout(path: PurePosixPath) -> bool:
    """Whether a path (relative to the library) is held out: by its hash alone, so no other file can change the split."""
    return int.from_bytes(hashlib.sha256(str(path).encode()).digest()[:8], "big") % 1000 < HELDOUT_PER_THOUSAND


def belongs(path: PurePosixPath) -> bool:
    """Whether a path (relative to the library) is part of the corpus."""
    return (
        path.suffix == ".py"
        and EXCLUDED_FOLDERS.isdisjoint(path.parts)
        and not any(part.startswith(EXCLUDED_PREFIXES) for part in path.parts)
    )


def read_corpus(root: Path | None = None) -> tuple[list[SourceFile], list[SourceFile]]:
    """The training and the held-out files under `root` (default: the running CPython's library), each sorted by path.

    Left out: empty files, files that are no UTF-8 (the library has some on purpose), copies of an earlier file, and
    training files that are a copy of a held-out one.
    """
    root = root or library()
    paths = sorted(PurePosixPath(p.relative_to(root).as_posix()) for p in root.rglob("*.py"))
    paths = [path for path in paths if belongs(path)]
    seen: set[bytes] = set()
    heldout = _distinct(root, [path for path in paths if is_heldout(path)], seen)
    train = _distinct(root, [path for path in paths if not is_heldout(path)], seen)
    return train, heldout


def _distinct(root: Path, paths: Iterable[PurePosixPath], seen: set[bytes]) -> list[SourceFile]:
    files = []
    for path in paths:
        content = (root / path).read_bytes()
        if not content.strip() or content in seen or not _is_utf8(content):
            continue
        seen.add(content)
        files.append(SourceFile(path, content))
    return files


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def read_manifest(split: str) -> dict[str, str]:
    """`{path: sha256}` of the files that the bundled demo model was trained on (`train`) or not (`heldout`)."""
    lines = MANIFESTS[split].read_text().splitlines()
    return {path: digest for digest, path in (line.split("  ", 1) for line in lines)}


def write_manifest(split: str, files: Iterable[SourceFile]) -> None:
    """Record `files` as the demo model's training or held-out text."""
    MANIFESTS[split].write_text("".join(f"{file.digest}  {file.path}\n" for file in files))


def differences(split: str, files: Iterable[SourceFile]) -> list[str]:
    """How `files` differ from the manifest, a line each; empty where they are the same text to the byte."""
    wanted, found = read_manifest(split), {str(file.path): file.digest for file in files}
    return [f"missing here: {path}" for path in sorted(wanted.keys() - found.keys())] + [
        f"{'changed' if path in wanted else 'not in the manifest'}: {path}"
        for path in sorted(found)
        if wanted.get(path) != found[path]
    ]


def describe_differences(train: list[SourceFile], heldout: list[SourceFile]) -> str | None:
    """One sentence where this machine's text is not the recorded one, else None."""
    lines = differences("train", train) + differences("heldout", heldout)
    if not lines:
        return None
    return (
        f"the library of this Python ({platform.python_version()}) is not the text that the bundled model was trained on: "
        f"{len(lines)} files differ (first: {lines[0]}); figures will be near, but not equal to, the recorded ones"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="compare this machine's library with the manifests")
    action.add_argument("--write", action="store_true", help="write the manifests from this machine's library")
    arguments = parser.parse_args()
    train, heldout = read_corpus()
    for split, files in (("train", train), ("heldout", heldout)):
        print(f"{split}: {len(files)} files, {sum(len(file.content) for file in files):,} bytes")
        if arguments.write:
            write_manifest(split, files)
    if difference := describe_differences(train, heldout):
        raise SystemExit(difference)
    print("the same text as in the manifests, to the byte")


if __name__ == "__main__":
    main()
