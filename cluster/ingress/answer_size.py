"""How large an answer may become.

Its text is bounded by its tokens; log-probabilities, many for each token, need a bound of their own.
"""

from collections.abc import Sequence

from hybridserve.cluster.ingress.errors import ApiError
from hybridserve.replicas.sampling_params import SamplingParams

# about 100 bytes of JSON each: 100 MB. 128 answers of 32,768 tokens with 64 alternatives each would be 27 GB
MAX_LOGPROB_ENTRIES = 2**20


def check_answer_size(prompt_lengths: Sequence[int], params: Sequence[SamplingParams]) -> None:
    """Raise a 400 when all answers together could have too many log-probabilities.

    params: of each prompt, `max_tokens` settled; `n` answers each.
    """
    entries = 0
    for length, one in zip(prompt_lengths, params, strict=True):
        if one.logprobs is not None:
            entries += one.n * (one.max_tokens or 0) * (1 + one.logprobs)
        if one.prompt_logprobs is not None:
            entries += one.n * length * (1 + one.prompt_logprobs)
    if entries > MAX_LOGPROB_ENTRIES:
        raise ApiError(
            400,
            f"the answers' tokens, up to max_tokens, could have {entries} log-probabilities, at most "
            f"{MAX_LOGPROB_ENTRIES} a request; a smaller max_tokens, n or number of logprobs fits",
            param="logprobs",
            code="answer_too_large",
        )
