"""`python -m dsjax.top` is `dsjax top`."""

from dsjax.cli import main

if __name__ == "__main__":
    main(["top"])
