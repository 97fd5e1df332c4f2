"""Check that a step supports `--batch-invariant`."""

from dsjax.errors import UserError
from dsjax.model.forms import WITH_KERNELS
from dsjax.model.step import ModelStep


def check_batch_invariant(step: ModelStep, platform: str) -> None:
    """Raise a `UserError` if a token's bits could depend on its batch: with two MLA forms, or reductions ordered by a compiler."""
    if step.prefill_form != step.decode_form or not step.decode_form.kernels:
        raise UserError(
            f"--batch-invariant computes prompts and decodes in one MLA form that has kernels, and --mla-prefill is {step.prefill_form}, "
            f"--mla-decode {step.decode_form}; leave --mla-prefill out, or give both {' or '.join(WITH_KERNELS)}"
        )
    if step.is_exact:
        return
    if platform != "cpu":
        problem = f"the devices are {platform}, where the order of sums follows the batch (dsjax dryrun --reductions lists them)"
    elif step.kernels.native is None:
        problem = step.kernels.note or f"--kernels leaves {step.kernels.name('other products')} ones"
    else:
        others = [name for name, by in step.implementations.items() if by != "native"]
        problem = f"{' and '.join(others)} have none for a cache in {step.cache_dtype.name} (--kv-cache-dtype)"
    raise UserError(
        f"--batch-invariant needs the native kernels, which compute in float32 on CPUs, for every product, but {problem}; leave it out"
    )
