"""Whether the token ids in a request's parameters exist. A device would clamp a wrong one and go on."""

from dsjax.engine.sampling_params import SamplingError, SamplingParams


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Every token id of every field against the vocabulary.

    Raises:
        SamplingError: naming the field, and the first id that is outside.
    """
    fields = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
    }
    if params.structured_outputs is not None and params.structured_outputs.structured_after is not None:
        fields["structured_outputs.structured_after"] = (params.structured_outputs.structured_after,)
    for name, token_ids in fields.items():
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise SamplingError(name, f"found {token_id}, expected 0 to {vocab_size - 1}")
