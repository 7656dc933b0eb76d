"""The golden prompt: what an engine has to answer before anybody else may ask it.

Pure; knows nothing of how it is asked. Its answer takes a prefill and a decode step through all shards.
"""

from hybridserve.cluster.pool.interface import EngineInfo, GenerationRequest
from hybridserve.cluster.pool.record import GenerationReply
from hybridserve.replicas.sampling_params import SamplingParams

_PROMPT_TOKENS = 8
# the first comes from the prompt's step, the second from one of decode
_ANSWER_TOKENS = 2


def golden_request(info: EngineInfo) -> GenerationRequest:
    """For that engine; shorter where its context is."""
    length = max(1, min(_PROMPT_TOKENS, info.max_model_len - _ANSWER_TOKENS))
    prompt = tuple(index % info.vocab_size for index in range(1, length + 1))
    params = SamplingParams(temperature=0.0, max_tokens=_answer_tokens(info), ignore_eos=True)
    return GenerationRequest("golden-prompt", prompt, params)


def golden_fault(info: EngineInfo, reply: GenerationReply) -> str | None:
    """What is wrong with the answer; None when it is as it should be."""
    output = reply.output
    fault = reply.refused or reply.failed or (None if output is None else output.error)
    if fault is None and output is not None:
        got, wanted = len(output.token_ids), _answer_tokens(info)
        if got != wanted:
            fault = f"it was answered with {got} tokens instead of {wanted}"
        elif not all(0 <= token < info.vocab_size for token in output.token_ids):
            fault = f"it was answered with {output.token_ids}, and the vocabulary has {info.vocab_size}"
    return None if fault is None else f"the golden prompt failed: {fault}"


def _answer_tokens(info: EngineInfo) -> int:
    return max(1, min(_ANSWER_TOKENS, info.max_model_len - 1))
