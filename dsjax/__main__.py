"""`python -m dsjax` is `dsjax`."""

from dsjax.cli import main

if __name__ == "__main__":
    main()
