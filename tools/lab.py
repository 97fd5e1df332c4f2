"""Small clusters of server processes on this machine: what they answer, and what is lost, while parts of them fail.

    python tools/lab.py hosts --losses 10 --leaves 5 --checkpoint-gb 2     # processes of a mesh are killed, and leave in order
    python tools/lab.py experts --processes 3 --at-once 2                  # processes with experts are killed (AFD)
    python tools/lab.py meshes                                             # a mesh over processes against one device
    sudo python tools/lab.py network                                       # a decode step against bandwidth, latency and congestion
    sudo python tools/lab.py accept --results found                        # dsjax accept, with the faults of its list made for real

`python tools/lab.py NAME --help` says what a lab does and prints. `network`, `accept` and cut links need Linux, root and iproute2: each
host is a network namespace.
"""

import argparse
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / part) for part in ("", "dsjax/hosts", "dsjax/engine"))]
from tools.labs import accept, experts, hosts, meshes, network
from tools.labs.namespaces import CannotBeError

LABS = {"hosts": hosts, "experts": experts, "meshes": meshes, "network": network, "accept": accept}


def main() -> int:
    """Run a lab."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = parser.add_subparsers(dest="lab", required=True, metavar="NAME")
    for name, lab in LABS.items():
        text = {"description": lab.__doc__, "help": lab.__doc__.partition("\n")[0].rstrip(".")}
        lab.add_options(names.add_parser(name, formatter_class=argparse.RawDescriptionHelpFormatter, **text))
    args = parser.parse_args()
    # As an error does, so that processes and namespaces are gone afterwards.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    try:
        return LABS[args.lab].run(args)
    except CannotBeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
