"""`python -m dsjax.bench` is `dsjax bench`."""

from dsjax.cli import main

if __name__ == "__main__":
    main(["bench"])
