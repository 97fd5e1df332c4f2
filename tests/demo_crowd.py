"""What a crowd of clients asks of the demo model, and the engine that answers each alone: the same programs for all who compare with it."""

from dsjax import LLM

CLIENTS = 64
NEW_TOKENS = 8
SIZES = {"max_model_len": 256, "prefill_chunk": 32, "max_num_seqs": 2}
_WORDS = (
    "def main(", "import os\n", "class Queue:\n", "for i in range(", "# Copyright", "return self.", "x = [", "try:\n",
)  # fmt: skip


def options() -> list[str]:
    """`SIZES` as a command's options."""
    return [item for name, value in SIZES.items() for item in (f"--{name.replace('_', '-')}", str(value))]


def prompt(client: int) -> str:
    """A prompt of its own for every client, of one to about forty tokens."""
    return _WORDS[client % 8] + "".join(f"value_{client} = {i}\n" for i in range(client // 8))


def one_device() -> LLM:
    return LLM("demo", mesh="dp=1", **SIZES)
