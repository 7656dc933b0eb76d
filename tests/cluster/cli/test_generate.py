import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hybridserve.replicas.llm import LLM, SamplingParams

PROMPT = "def add(a, b):\n"
SMALL = ("--cache-memory", "16MiB", "--max-tokens", 6, "--temperature", 0)


@pytest.fixture(scope="module")
def greedy(demo_model: Path) -> Callable[[str], str]:
    """What the offline API answers."""
    llm = LLM(str(demo_model), cache_memory_bytes=16 * 2**20, show_progress=False)
    params = SamplingParams(temperature=0, max_tokens=6)
    return lambda prompt: llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text


def test_one_prompt_streams(hybridserve: Callable, demo_model: Path, greedy: Callable[[str], str]) -> None:
    ran = hybridserve("generate", demo_model, "--prompt", PROMPT, *SMALL)
    assert ran.code == 0, ran.err
    assert ran.out == greedy(PROMPT) + "\n"
    assert "loading weights" in ran.err
    assert re.search(r"\[\d+ prompt tokens, \d generated, (length|stop); first token after \d+ ms", ran.err)


def test_two_processes_share_the_model(
    hybridserve: Callable, demo_model: Path, greedy: Callable[[str], str]
) -> None:
    threads = torch.get_num_threads()
    ran = hybridserve("generate", demo_model, "--tp", 2, "--device", "cpu", "--prompt", PROMPT, *SMALL)
    torch.set_num_threads(threads)
    assert (ran.code, ran.out) == (0, greedy(PROMPT) + "\n"), ran.err


def test_a_file_of_prompts_gives_json_lines(
    hybridserve: Callable, demo_model: Path, greedy: Callable[[str], str], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [PROMPT, {"prompt": "import os\n"}, [5, 6, 7]]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ran = hybridserve("generate", demo_model, "--prompts-file", prompts, *SMALL)
    assert ran.code == 0, ran.err
    answers = [json.loads(line) for line in ran.out.splitlines()]
    assert [a["text"] for a in answers[:2]] == [greedy(PROMPT), greedy("import os\n")]
    assert [a["prompt"] for a in answers] == [PROMPT, "import os\n", None]
    assert answers[2]["num_prompt_tokens"] == 3
    assert "3/3" in ran.err


def test_chat_into_a_file(hybridserve: Callable, demo_model: Path, tmp_path: Path) -> None:
    prompts, answers = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("hello\n\nworld\n")
    options = ("--chat", "--system", "be brief", "--prompts-file", prompts, "--output", answers)
    ran = hybridserve("generate", demo_model, *options, *SMALL)
    assert (ran.code, ran.out) == (0, "")
    rendered = [json.loads(line)["prompt"] for line in answers.read_text().splitlines()]
    start = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n"
    end = "<|im_end|>\n<|im_start|>assistant\n"
    assert rendered == [start + "hello" + end, start + "world" + end]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["MODEL"], 1, "error: no prompt: give --prompt or --prompts-file"),
        (["/nowhere", "--prompt", "a"], 1, "error: model folder '/nowhere' does not exist"),
        (["MODEL", "--prompt", "a", "--top-p", "1.5"], 1, "error: top_p must be in (0, 1], got 1.5"),
        (["MODEL", "--prompt", "a", "--max-tokens", "0"], 1, "error: max_tokens must be at least 1, got 0"),
        (["MODEL", "--prompt", "a", "--cache-memory", "few"], 1, "cache_memory must be a size such as"),
        (["MODEL", "--prompt", "a", "--device", "tpu"], 1, "error: device must be one of auto, cpu, cuda"),
        (["MODEL", "--prompt", "a", "--tp", "3"], 1, "error: tensor_parallel_size is 3, but tp_size 3 does"),
        (["MODEL", "--prompt", "a", "--system", "b"], 1, "error: system is a chat message"),
        (["MODEL", "--prompts-file", "/nowhere.txt"], 1, "/nowhere.txt"),
        (["MODEL", "--prompt", "a", "--output", "/nowhere/a"], 1, "error: output '/nowhere/a': there is no"),
        (
            ["MODEL", "--prompt", "a", "--output", "/"],
            1,
            "error: output '/' cannot be written: Is a directory",
        ),
        (["MODEL", "--prompt", "a", "--seed", "x"], 2, "--seed"),
        (["MODEL", "--prompt", "a", "--unknown"], 2, "--unknown"),
    ],
)
def test_errors_are_short(
    hybridserve: Callable, demo_model: Path, args: list[str], code: int, message: str
) -> None:
    ran = hybridserve("generate", *(demo_model if arg == "MODEL" else arg for arg in args))
    assert ran.code == code
    assert ran.out == ""
    assert message in ran.err
    assert "Traceback" not in ran.err
    if code == 1:
        assert ran.err.count("\n") == 1


def test_a_line_that_is_no_json_is_named(hybridserve: Callable, demo_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"a"\n{\n')
    ran = hybridserve("generate", demo_model, "--prompts-file", file)
    assert ran.code == 1
    assert ran.err.startswith("error: prompt 2 of the file is not JSON")
    file.write_text('"a"\n3\n')
    ran = hybridserve("generate", demo_model, "--prompts-file", file, "--chat")
    assert ran.code == 1
    assert ran.err == "error: with chat a prompt must be text, got int\n"


def test_an_empty_prompt_is_refused(hybridserve: Callable, demo_model: Path) -> None:
    ran = hybridserve("generate", demo_model, "--prompt", "", *SMALL)
    assert ran.code == 1
    assert "error: prompts[0]: prompt is empty" in ran.err
    assert "Traceback" not in ran.err
