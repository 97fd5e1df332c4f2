"""A front end as the engine's process starts it: `python -m dsjax.serve.front_ends CHANNEL LISTENER`, two inherited descriptors."""

import sys

from dsjax.serve.front_ends.front_end import run

if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), int(sys.argv[2])))
