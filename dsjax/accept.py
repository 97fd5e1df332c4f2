"""`python -m dsjax.accept` is `dsjax accept`; the code is in `dsjax/bench/accept`."""

from dsjax.cli import main

if __name__ == "__main__":
    main(["accept"])
