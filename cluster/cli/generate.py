"""`hybridserve generate`: answer prompts on this machine, without a server.

Owns reading prompts and printing answers: one prompt streams to the terminal, several become JSON lines.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from hybridserve.cluster.cli.output_file import check_writable
from hybridserve.cluster.sizes import parse_size
from hybridserve.replicas.outputs import RequestOutput
from hybridserve.replicas.prompts import Prompt
from hybridserve.replicas.sampling_params import SamplingParams


def generate(
    model: Annotated[str, typer.Argument(help="Folder of a Hugging Face checkpoint.", show_default=False)],
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be repeated.")] = None,
    prompts_file: Annotated[
        Path | None, typer.Option(help="One prompt a line; .jsonl: a JSON string, list of ids or object.")
    ] = None,
    chat: Annotated[bool, typer.Option(help="Each prompt is a user's message.")] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: always the likeliest token.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest that sum to this.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from this many likeliest; 0: from all.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Least share of the likeliest's chance.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    state_dtype: Annotated[
        str, typer.Option(help="Of recurrent states between steps: float32 or bfloat16.")
    ] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    tp: Annotated[int, typer.Option(min=1, help="Processes of this machine that share the model.")] = 1,
    max_model_len: Annotated[int | None, typer.Option(help="Longest context in tokens.")] = None,
    cache_memory: Annotated[
        str | None, typer.Option(help="Memory for states and KV, such as 512MiB.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the answers as JSON lines to this file.")] = None,
) -> None:
    """Answer prompts on this machine; one prompt streams, several give one JSON line each."""
    prompts = _read_prompts(prompt or [], prompts_file)
    if system is not None and not chat:
        raise ValueError("system is a chat message, but chat is not set")
    questions = [_conversation(p, system) for p in prompts] if chat else prompts
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "stop": stop or None,
    }
    sampling = {name: value for name, value in sampling.items() if value is not None}
    # what is wrong with the options is said before seconds go into loading
    SamplingParams(**sampling)
    cache_bytes = None if cache_memory is None else parse_size("cache_memory", cache_memory)
    if output is not None:
        check_writable("output", output)

    # read when torch loads its OpenMP: beside another busy process, threads that wait by spinning made a step
    # eight times as long
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # imports torch, which takes seconds; the other commands do without
    from hybridserve.replicas.llm import LLM

    llm = LLM(
        model,
        dtype=dtype,
        state_dtype=state_dtype,
        device=device,
        tensor_parallel_size=tp,
        max_model_len=max_model_len,
        cache_memory_bytes=cache_bytes,
    )
    params = replace(llm.get_default_sampling_params(), **sampling)
    stream = len(prompts) == 1 and output is None
    answer = llm.chat if chat else llm.generate
    outputs = answer(questions, params, use_tqdm=not stream, on_text=_print_text if stream else None)
    _report(outputs, stream, output)


def _read_prompts(prompts: Sequence[str], file: Path | None) -> list[Prompt]:
    """The prompts of the command line, then those of the file."""
    found: list[Prompt] = list(prompts)
    if file is not None:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        found += map(_parse_line, range(1, len(lines) + 1), lines) if file.suffix == ".jsonl" else lines
    if not found:
        raise ValueError("no prompt: give --prompt or --prompts-file")
    return found


def _parse_line(number: int, line: str) -> Prompt:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"prompt {number} of the file is not JSON: {error}") from error


def _conversation(prompt: Prompt, system: str | None) -> list[dict[str, str]]:
    if isinstance(prompt, Mapping) and list(prompt) == ["prompt"]:
        prompt = prompt["prompt"]
    if not isinstance(prompt, str):
        raise ValueError(f"with chat a prompt must be text, got {type(prompt).__name__}")
    before = [{"role": "system", "content": system}] if system is not None else []
    return [*before, {"role": "user", "content": prompt}]


def _print_text(prompt_index: int, answer_index: int, text: str) -> None:
    typer.echo(text, nl=False)


def _report(outputs: Sequence[RequestOutput], stream: bool, file: Path | None) -> None:
    """Print what is not on the terminal yet, and say how it went.

    Raises:
        ValueError: the engine gave an answer up.
    """
    if stream:
        typer.echo()
        typer.echo(_summary(outputs[0]), err=True)
    else:
        lines = "".join(_json_line(output) + "\n" for output in outputs)
        if file is not None:
            file.write_text(lines, encoding="utf-8")
        else:
            typer.echo(lines, nl=False)
    failed = [
        (i, o.outputs[0].stop_reason) for i, o in enumerate(outputs) if o.outputs[0].finish_reason == "error"
    ]
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(outputs)} answers failed; prompt {failed[0][0]}: {failed[0][1]}"
        )


def _summary(output: RequestOutput) -> str:
    answer, metrics = output.outputs[0], output.metrics
    assert metrics is not None
    first = metrics.first_token_time - metrics.arrival_time
    rest = metrics.finished_time - metrics.first_token_time
    rate = f", then {(len(answer.token_ids) - 1) / rest:.1f} tokens/s" if len(answer.token_ids) > 1 else ""
    return (
        f"[{len(output.prompt_token_ids)} prompt tokens, {len(answer.token_ids)} generated, "
        f"{answer.finish_reason}; first token after {first * 1e3:.0f} ms{rate}]"
    )


def _json_line(output: RequestOutput) -> str:
    answer = output.outputs[0]
    return json.dumps(
        {
            "prompt": output.prompt,
            "num_prompt_tokens": len(output.prompt_token_ids),
            "text": answer.text,
            "num_tokens": len(answer.token_ids),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        },
        ensure_ascii=False,
    )
