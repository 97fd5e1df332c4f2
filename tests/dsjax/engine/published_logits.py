"""What sampling parameters do to a row of logits, by their published definitions in float64: token by token, and as probabilities."""

import numpy as np

from dsjax.engine.contract.sampling_params import SamplingParams


def published(logits, prompt, output, stop_ids=(), bad_words=(), **params):
    """vLLM's and OpenAI's definitions, token by token in float64."""
    params = SamplingParams(max_tokens=5000, **params)
    x = logits.astype(np.float64)
    for token in range(len(x)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            x[token] = -np.inf
        for word in bad_words:
            if word[-1] == token and tuple(output[len(output) - len(word) + 1 :]) == tuple(word[:-1]):
                x[token] = -np.inf
        if token in stop_ids and len(output) < params.min_tokens:
            x[token] = -np.inf
        x[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in output:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        x[token] -= params.frequency_penalty * output.count(token)
        x[token] -= params.presence_penalty * (token in output)
    return x


def distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """How probable each token is: temperature, min-p, then top-k, then the smallest set that reaches top-p."""
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs[probs < min_p] = 0
    order = np.argsort(-probs)
    if top_k > 0:
        probs[order[top_k:]] = 0
    probs /= probs.sum()
    reached = np.cumsum(probs[order])
    probs[order[1:][reached[:-1] >= top_p]] = 0
    return probs / probs.sum()
