"""`LLM` on a shape: random weights, token ids in and out, no text."""

from pathlib import Path

import pytest

from hybridserve.replicas.llm import LLM, SamplingParams
from hybridserve.replicas.models.config import read_mapping

from ..small_shape import SMALL

SMALL_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
IDS = {"prompt_token_ids": list(range(2, 40))}


def small(shape: Path) -> LLM:
    """The shape's model type and wiring in a size that fits a test."""
    overrides = {**SMALL, **(SMALL_EXPERTS if "num_experts" in read_mapping(shape) else {})}
    options = {"device": "cpu", "dtype": "float32", "cache_memory_bytes": 2**22, "show_progress": False}
    return LLM(model=str(shape), load_format="dummy", hf_overrides=overrides, **options)


@pytest.fixture(scope="module")
def llm(repo_root: Path) -> LLM:
    return small(repo_root / "configs" / "models" / "qwen3.5-9b.yaml")


def test_token_ids_without_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2)
    outputs = llm.generate([IDS, {"prompt_token_ids": [5, 6]}], params, use_tqdm=False)
    answers = [o.outputs[0] for o in outputs]
    assert [len(a.token_ids) for a in answers] == [5, 5] and all(a.text == "" for a in answers)
    assert all(a.finish_reason == "length" and len(a.logprobs) == 5 for a in answers)
    assert outputs[0].prompt is None and outputs[0].prompt_token_ids == IDS["prompt_token_ids"]
    again = llm.generate(IDS, params, use_tqdm=False)
    assert again[0].outputs[0].token_ids == answers[0].token_ids


def test_text_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\]: .*9b.yaml was loaded without a tokenizer"):
        llm.generate([IDS, "text"], use_tqdm=False)
    with pytest.raises(ValueError, match="without a tokenizer"):
        llm.chat([{"role": "user", "content": "hello"}], use_tqdm=False)
    with pytest.raises(ValueError, match="without a tokenizer"):
        llm.get_tokenizer().decode([3])
    for params in (SamplingParams(stop="end"), [SamplingParams(stop="end")]):
        with pytest.raises(ValueError, match=r"stop is \['end'\], but without a tokenizer"):
            llm.generate(IDS, params, use_tqdm=False)
    assert not llm.engine.has_unfinished()


def test_nothing_is_answered_after_the_shutdown(repo_root: Path) -> None:
    llm = small(repo_root / "configs" / "models" / "qwen3.5-9b.yaml")
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(RuntimeError, match="the engine was shut down"):
        llm.generate(IDS, use_tqdm=False)
    assert not llm.engine.has_unfinished()


def test_weights_are_asked_for(repo_root: Path) -> None:
    with pytest.raises(ValueError, match="load_format is 'auto', but .* is a shape without weights"):
        LLM(str(repo_root / "configs" / "models" / "qwen3.5-9b.yaml"))


def test_a_checkpoint_without_its_tokenizer(demo_model: Path) -> None:
    llm = LLM(str(demo_model), device="cpu", cache_memory_bytes=2**25, skip_tokenizer_init=True)
    (output,) = llm.generate([5, 6, 7], SamplingParams(max_tokens=2), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2 and output.outputs[0].text == ""


@pytest.mark.parametrize("name", ["qwen3.5-35b-a3b", "qwen3-next-80b-a3b"])
def test_moe_shapes_run(repo_root: Path, name: str) -> None:
    shape = repo_root / "configs" / "models" / f"{name}.yaml"
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    assert len(small(shape).generate(IDS, params, use_tqdm=False)[0].outputs[0].token_ids) == 3
