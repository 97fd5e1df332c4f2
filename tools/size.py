"""Print the lines of each room, and how they differ from those at another commit:

    python tools/size.py                 # now, and at the last commit
    python tools/size.py 371ccc8         # now, and at that commit
    python tools/size.py 371ccc8 main    # at two commits

Rooms are the folders of `dsjax` (of `dsjax/engine` too, when they change), `sharding`, `tests` and `tools`. Lines are those of Python and
C++ files; of pages, the words are counted.
"""

import argparse
import subprocess
import sys
from collections import Counter
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
CODE = (".py", ".cc", ".h")
PRODUCT = "product: dsjax, sharding"
WORDS = "words: docs, README"


def files_now() -> dict[str, bytes]:
    """The files of the working tree that git tracks or does not ignore."""
    names = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").decode().split("\0")
    return {name: (ROOT / name).read_bytes() for name in names if _counts(name) and (ROOT / name).is_file()}


def files_at(revision: str) -> dict[str, bytes]:
    """The files of a commit."""
    names = [name for name in _git("ls-tree", "-rz", "--name-only", revision).decode().split("\0") if _counts(name)]
    wanted = "".join(f"{revision}:{name}\n" for name in names)
    rest, found = _git("cat-file", "--batch", text=wanted.encode()), {}
    for name in names:  # for each: "<object> blob <bytes>\n<content>\n"
        head, _, rest = rest.partition(b"\n")
        length = int(head.split()[-1])
        found[name], rest = rest[:length], rest[length + 1 :]
    return found


def sizes(files: dict[str, bytes]) -> Counter[str]:
    """Lines by room, and the words of the pages."""
    rooms: Counter[str] = Counter()
    for name, content in files.items():
        path = PurePosixPath(name)
        if path.suffix == ".md":
            rooms[WORDS] += len(content.split()) if name == "README.md" or path.parts[0] == "docs" else 0
            continue
        lines = content.count(b"\n")
        rooms[PRODUCT] += lines if path.parts[0] in ("dsjax", "sharding") else 0
        for room in _rooms(path):
            rooms[room] += lines
    return rooms


def table(before: Counter[str], after: Counter[str]) -> list[str]:
    """A row for each room; folders of `dsjax/engine` only where they differ."""
    rows = []
    for room in sorted(before | after):
        was, now = before[room], after[room]
        if now or was:
            if room.startswith("dsjax/engine/") and was == now:
                continue
            rows.append(f"{room:28s} {was:8,} {now:8,} {now - was:+8,}")
    return rows


def _rooms(path: PurePosixPath) -> list[str]:
    top = path.parts[0]
    if top != "dsjax":
        return [top] if top in ("sharding", "tests", "tools", "configs", "notebooks") else []
    folders = path.parent.parts
    if len(folders) == 1:
        return ["dsjax, files at the top"]
    return ["/".join(folders[:2]), *(["/".join(folders[:3])] if folders[1] == "engine" and len(folders) > 2 else [])]


def _counts(name: str) -> bool:
    return name.endswith((*CODE, ".md"))


def _git(*arguments: str, text: bytes | None = None) -> bytes:
    ran = subprocess.run(["git", *arguments], cwd=ROOT, input=text, capture_output=True)
    if ran.returncode:
        sys.exit(f"git {' '.join(arguments)}: {ran.stderr.decode().strip()}")
    return ran.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", default="HEAD", metavar="COMMIT", help="default: the last commit")
    parser.add_argument("after", nargs="?", metavar="COMMIT", help="default: the working tree")
    options = parser.parse_args()
    before = sizes(files_at(options.before))
    after = sizes(files_at(options.after) if options.after else files_now())
    print(f"{'lines':28s} {options.before[:8]:>8s} {(options.after or 'now')[:8]:>8s}   change")
    print("\n".join(table(before, after)))


if __name__ == "__main__":
    main()
