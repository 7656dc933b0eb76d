"""Several pieces of news of one request as one, for a reader that has fallen behind.

Handing over and sending an event costs many times what a token in it costs. An ingress that is behind
therefore catches up, where one that sent every token by itself would fall behind further with each step.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from hybridserve.replicas.engine.plan import EngineOutput


def joined(outputs: Sequence[EngineOutput]) -> EngineOutput:
    """All that `outputs` say, which follow each other without a gap."""
    if len(outputs) == 1:
        return outputs[0]
    first, last = outputs[0], outputs[-1]
    assert all(
        after.first_index == before.first_index + len(before.token_ids)
        for before, after in zip(outputs, outputs[1:], strict=False)
    ), [(one.first_index, len(one.token_ids)) for one in outputs]
    return replace(
        last,
        first_index=first.first_index,
        token_ids=tuple(chain.from_iterable(one.token_ids for one in outputs)),
        logprobs=tuple(chain.from_iterable(one.logprobs for one in outputs)),
        prompt_logprobs=next((one.prompt_logprobs for one in outputs if one.prompt_logprobs), ()),
        first_scheduled_time=first.first_scheduled_time,
    )
