"""Whether one engine's greedy tokens are another's, as far as rounding lets anybody tell.

The candidate follows the reference's answers: it decodes from the prompt until its token is another one, and
starts again behind that place with the reference's token, so that all of its tokens are made from the same
text. Where it takes another token, the reference's own logprobs say how near the two were. Sums in another
order move logprobs, and the reference itself shows by how much: its answers, scored as parts of prompts, have
other sizes of products and other kernels than when they were decoded. Two tokens move against each other,
each by at most twice what is seen there: a gap of more than `MOST_MOVES` times that is no rounding.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridserve.replicas.llm import LLM, SamplingParams
from hybridserve.replicas.outputs import CompletionOutput

LIKELIEST = 8
"""Tokens whose logprobs the reference reports at each place."""
MOST_MOVES = 4


@dataclass(frozen=True)
class Answer:
    """One of the reference's, with what it knows of each place."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[dict[int, float]]
    """The likeliest tokens'."""


@dataclass
class Agreement:
    """What the candidate gave beside the reference."""

    answers: int
    tokens: int
    distinct: int
    """Different tokens in the answers: few of them make equality cheap."""
    noise: float
    """The most that a chosen token's logprob moves between the reference's own two ways."""
    equal_answers: int = 0
    equal_tokens: int = 0
    equal_before_difference: int = 0
    """Of each answer, the tokens before its first difference."""
    moved: list[float] = field(default_factory=list)
    """By how much the logprob of an equal token differs."""
    gaps: list[float] = field(default_factory=list)
    """Of every difference: the reference's logprob of its own token less that of the candidate's."""
    first_gaps: list[float] = field(default_factory=list)

    @property
    def bound(self) -> float:
        return MOST_MOVES * self.noise

    @property
    def is_rounding(self) -> bool:
        """Whether every difference is between tokens that are as near as rounding."""
        return all(gap <= self.bound for gap in self.gaps)

    def lines(self) -> list[str]:
        told = [
            f"{self.equal_answers} of {self.answers} answers equal, {self.equal_before_difference} of "
            f"{self.tokens} tokens before a first difference, {self.distinct} distinct",
            f"following the same text: {self.equal_tokens} of {self.tokens} tokens equal "
            f"({self.equal_tokens / self.tokens:.2%})",
            f"logprobs: one engine's own two ways differ by up to {self.noise:.3g}; the two engines' by up "
            f"to {max(self.moved, default=0.0):.3g}, median {statistics.median(self.moved or [0.0]):.3g}",
        ]
        if self.gaps:
            told.append(
                f"largest gap at a first difference {max(self.first_gaps):.3g}, at any {max(self.gaps):.3g}; "
                f"at most {self.bound:.3g} is rounding: {'yes' if self.is_rounding else 'NO'}"
            )
        return told


def reference_answers(llm: LLM, prompts: Sequence[list[int]], tokens: int) -> tuple[list[Answer], float]:
    """Greedy answers of so many tokens, and the noise of their logprobs: see `Agreement`."""
    outputs = _decode(llm, prompts, [tokens] * len(prompts))
    answers = [
        Answer(list(prompt), list(output.token_ids), [_plain(table) for table in output.logprobs])
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    return answers, max(abs(moved) for answer in answers for moved in _moves(llm, answer))


def _moves(llm: LLM, answer: Answer) -> list[float]:
    """How each token's logprob differs when the answer is scored as part of a prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    whole = answer.prompt + answer.token_ids
    [output] = llm.generate([{"prompt_token_ids": whole}], params, use_tqdm=False)
    scored = output.prompt_logprobs[len(answer.prompt) :]
    return [
        table[token].logprob - known[token]
        for token, table, known in zip(answer.token_ids, scored, answer.logprobs, strict=True)
    ]


def compare(llm: LLM, answers: Sequence[Answer], noise: float) -> Agreement:
    """Let the candidate follow the reference's answers."""
    every = [token for answer in answers for token in answer.token_ids]
    found = Agreement(len(answers), len(every), len(set(every)), noise)
    # (answer, how many of its tokens are behind the candidate)
    left = [(answer, 0) for answer in answers]
    while left:
        prompts = [answer.prompt + answer.token_ids[:done] for answer, done in left]
        outputs = _decode(llm, prompts, [len(answer.token_ids) - done for answer, done in left])
        ends = [_follow(found, *one, output) for one, output in zip(left, outputs, strict=True)]
        left = [
            (answer, end) for (answer, _), end in zip(left, ends, strict=True) if end < len(answer.token_ids)
        ]
    return found


def _follow(found: Agreement, answer: Answer, done: int, output: CompletionOutput) -> int:
    """Count tokens up to the first other one; returns how many of the answer are behind the candidate."""
    for place in range(done, len(answer.token_ids)):
        theirs, known = output.token_ids[place - done], answer.logprobs[place]
        ours = answer.token_ids[place]
        if theirs != ours:
            # one that is not even among the likeliest is at least as far as the last of those
            gap = known[ours] - known.get(theirs, min(known.values()))
            found.gaps.append(gap)
            if done == 0:
                found.first_gaps.append(gap)
                found.equal_before_difference += place
            return place + 1
        found.equal_tokens += 1
        found.moved.append(abs(output.logprobs[place - done][ours].logprob - known[ours]))
    if done == 0:
        found.equal_answers += 1
        found.equal_before_difference += len(answer.token_ids)
    return len(answer.token_ids)


def _decode(llm: LLM, prompts: Sequence[list[int]], counts: Sequence[int]) -> list[CompletionOutput]:
    """Greedy answers with logprobs; raises RuntimeError when one is not as long as asked."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=LIKELIEST)
        for count in counts
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    for answer, count in zip(answers, counts, strict=True):
        if len(answer.token_ids) != count:
            raise RuntimeError(
                f"an answer has {len(answer.token_ids)} tokens of {count}: {answer.stop_reason}"
            )
    return answers


def _plain(table: dict) -> dict[int, float]:
    return {token: one.logprob for token, one in table.items()}
