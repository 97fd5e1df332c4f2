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
CODE = ("*.py", "*.cc", "*.h")
PRODUCT = "product: dsjax, sharding"
WORDS = "words: docs, README"


def sizes(revision: str | None) -> Counter[str]:
    """Return the lines by room, and the words of the pages, at a commit; None: in the working tree, with files that git does not ignore."""
    tree = ["", revision] if revision else ["--untracked", ""]  # the empty pattern matches every line
    rooms: Counter[str] = Counter()
    for counted in _git("grep", "-c", *tree, "--", *CODE).splitlines():  # [REVISION:]PATH:LINES
        name, _, lines = counted.removeprefix(f"{revision}:").rpartition(":")
        path = PurePosixPath(name)
        rooms[PRODUCT] += int(lines) if path.parts[0] in ("dsjax", "sharding") else 0
        for room in _rooms(path):
            rooms[room] += int(lines)
    rooms[WORDS] = len(_git("grep", "-h", *tree, "--", "README.md", "docs/**.md").split())
    return rooms


def table(before: Counter[str], after: Counter[str]) -> list[str]:
    """A row for each room; folders of `dsjax/engine` only where they differ."""
    rows = []
    for room in sorted(before | after):
        was, now = before[room], after[room]
        if was != now or not room.startswith("dsjax/engine/"):
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


def _git(*arguments: str) -> str:
    ran = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    if ran.returncode:
        sys.exit(f"git {' '.join(arguments)}: {ran.stderr.strip()}")
    return ran.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", default="HEAD", metavar="COMMIT", help="default: the last commit")
    parser.add_argument("after", nargs="?", metavar="COMMIT", help="default: the working tree")
    options = parser.parse_args()
    before, after = sizes(options.before), sizes(options.after)
    print(f"{'lines':28s} {options.before[:8]:>8s} {(options.after or 'now')[:8]:>8s}   change")
    print("\n".join(table(before, after)))


if __name__ == "__main__":
    main()
