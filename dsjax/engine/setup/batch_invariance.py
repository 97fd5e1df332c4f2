"""What `--batch-invariant` asks of a step: refusals where it cannot be had, and the sums whose order it leaves open on accelerators."""

from collections.abc import Iterator

from dsjax.config.weights import WEIGHT_FORMATS
from dsjax.errors import UserError
from dsjax.model.forms import WITH_KERNELS
from dsjax.model.parameters import Weights
from dsjax.model.step import ModelStep

OPERATIONS = ("decode attention", "prefill attention", "experts", "other products")
"""Operations that must have kernels."""


OPEN_SUMS = (
    "--batch-invariant leaves to the compiler: the draw's probabilities and their running sum over the vocabulary"
)
"""The sums whose order it does not fix on accelerators, as the message at start has them."""


def check_batch_invariant(step: ModelStep, platform: str, weights: Weights) -> None:
    """Refuse what would let a token's bits depend on the batch that it is computed in: two MLA forms, or sums left to the compiler."""
    if step.prefill_form != step.decode_form or not step.decode_form.kernels:
        raise UserError(
            f"--batch-invariant computes prompts and decodes in one MLA form that has kernels, and --mla-prefill is {step.prefill_form}, "
            f"--mla-decode {step.decode_form}; leave --mla-prefill out, or give both {' or '.join(WITH_KERNELS)}"
        )
    if step.is_exact:
        return
    if step.kernels.fixed:
        found = next(_left_open(step, weights), None)
        if found is None:
            return
        raise UserError(f"--batch-invariant gives every sum one order, but {found}; leave it out")
    found = (
        f"the devices are {platform} and --kernels is plain"
        if platform != "cpu"
        else step.kernels.note or f"--kernels leaves {step.kernels.name('other products')} ones"
    )
    raise UserError(
        "--batch-invariant needs the native kernels, which compute in float32 on CPUs, or those for GPUs and TPUs, for every product, "
        f"but {found}; leave it out"
    )


def _left_open(step: ModelStep, weights: Weights) -> Iterator[str]:
    """Why a step with Pallas kernels cannot have it."""
    if step.config.attention.indexer is not None:
        yield "the model has sparse attention, parts of which are XLA's"
    if WEIGHT_FORMATS[weights].packed is not None:
        yield f"the experts' kernels for --weights {weights} take tiles that follow the rows"
    for operation in OPERATIONS:
        needed = operation != "experts" or step.config.is_moe
        if needed and step.implementations[operation] != "pallas":
            yield step.kernels.note or f"{operation} is plain here"
