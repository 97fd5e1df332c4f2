"""Makes the goldens of the engine's commands (`tests/goldens/commands`) anew, or compares them with what the engine does now.

    python tools/record_commands.py --check                # what differs, and exit status 1 where anything does
    python tools/record_commands.py                        # make them anew
    python tools/record_commands.py --full /tmp/commands   # every command in full, one file a stream, to diff two commits

Scenarios (`tests/dsjax/engine/recorded_scenarios.py`) run on a virtual clock and in one thread, and compute nothing. All of
them together take seconds.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "dsjax" / "engine")]

from command_goldens import difference, path_of, streams_of, write
from recorded_scenarios import SCENARIOS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="scenario", help=f"all by default: {', '.join(SCENARIOS)}")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("--full", type=Path, metavar="DIRECTORY", help="write every command in full, and no goldens")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.scenarios if name not in SCENARIOS]
    if unknown:
        parser.error(f"found {', '.join(unknown)}, expected some of {', '.join(SCENARIOS)}")
    status = 0
    for name in arguments.scenarios or SCENARIOS:
        if arguments.check:
            found = difference(name, streams_of(name))
            status |= found is not None
            print(found or f"{name}: equal")
        elif arguments.full is not None:
            arguments.full.mkdir(parents=True, exist_ok=True)
            for stream, lines in streams_of(name).items():
                text = "".join(f"{line} {line.command or ''}\n" for line in lines)
                (arguments.full / f"{name}-{stream}.txt").write_text(text, encoding="utf-8")
        else:
            path = write(name)
            print(f"{path.relative_to(ROOT)}: {len(path_of(name).read_text().splitlines())} lines")
    return status


if __name__ == "__main__":
    sys.exit(main())
