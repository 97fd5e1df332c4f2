"""`python -m dsjax.dynamo` is `dsjax dynamo`."""

from dsjax.cli import main

if __name__ == "__main__":
    main(["dynamo"])
