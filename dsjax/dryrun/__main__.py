"""`python -m dsjax.dryrun` is `dsjax dryrun`."""

from dsjax.cli import main

if __name__ == "__main__":
    main(["dryrun"])
