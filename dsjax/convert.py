"""`python -m dsjax.convert` is `dsjax convert`; the code is in `dsjax/cli`."""

from dsjax.cli import main

if __name__ == "__main__":
    main(["convert"])
