"""What a request must satisfy for a given model; shared by the engine and by whoever refuses earlier."""

from collections.abc import Sequence

from hybridserve.replicas.sampling_params import SamplingParams


def check_prompt(token_ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """Raise ValueError unless the prompt is one the model can go on from."""
    if not token_ids:
        raise ValueError("prompt is empty: at least one token is needed")
    if len(token_ids) >= max_model_len:
        raise ValueError(
            f"prompt has {len(token_ids)} tokens, but the context holds {max_model_len} (max_model_len) and "
            "one more is needed to answer"
        )
    _check_ids("prompt", token_ids, vocab_size)


def check_output(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError unless an answer so far (of at least one token) is the model's own tokens."""
    _check_ids("output", token_ids, vocab_size)


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError when `stop_token_ids` or `logit_bias` names a token the model does not have."""
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token_id in ids:
            if token_id >= vocab_size:
                raise ValueError(f"{name} holds token {token_id}, outside the vocabulary of {vocab_size}")


def _check_ids(what: str, token_ids: Sequence[int], vocab_size: int) -> None:
    # whole-list checks first: a prompt of 100,000 tokens must not cost a Python loop
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return
    for at, token_id in enumerate(token_ids):
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise ValueError(f"{what} token {at} is {token_id!r}, outside the vocabulary of {vocab_size}")
