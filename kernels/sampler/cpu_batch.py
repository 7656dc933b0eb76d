"""What the sampler's Triton forms do, in plain PyTorch with the same arguments: of whole batches, on a CPU.

Knows nothing of requests.
"""

import torch

from hybridserve.kernels.sampler import cpu


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest id of each row's largest logit, and whether the row is finite: see the folder's `greedy`."""
    finite = cpu.rows_finite(logits)
    return _without_broken(logits, finite).argmax(-1), finite


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row, and whether the row is finite: see the folder's `sample`."""
    finite = cpu.rows_finite(logits)
    whole = _without_broken(logits, finite).float()
    return cpu.sample(whole, temperature, top_k, top_p, min_p, keys), finite


def sample_seeded(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample` with the keys of seeds and positions: see the folder's `sample_seeded`."""
    return sample(logits, temperature, top_k, top_p, min_p, cpu.draw_keys(seeds, positions))


def penalize_batch(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    prompt_lens: torch.Tensor,
    lens: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    counts: torch.Tensor | None = None,
) -> None:
    """Apply penalties to a batch in place: see the folder's `penalize_batch`. `counts` is not needed here."""
    bounds = zip(prompt_lens.tolist(), lens.tolist(), strict=True)
    penalties = zip(repetition.tolist(), presence.tolist(), frequency.tolist(), strict=True)
    for row, ids, (prompt, length), given in zip(logits, token_ids.long(), bounds, penalties, strict=True):
        if given != (1.0, 0.0, 0.0):
            # rounded to a narrow dtype once, at the end
            wide = row.float()
            cpu.penalize(wide, ids[:prompt], ids[prompt:length], *given)
            row.copy_(wide)


def bias_batch(
    logits: torch.Tensor, bias_ids: torch.Tensor, biases: torch.Tensor, banned_ids: torch.Tensor
) -> None:
    """Biases, then bans, of a batch in place: see the folder's `bias_batch`."""
    vocab = logits.shape[1]
    biased, banned = ((ids >= 0) & (ids < vocab) for ids in (bias_ids, banned_ids))
    for i, row in enumerate(logits):
        ids = bias_ids[i, biased[i]]
        row[ids] = (row[ids].float() + biases[i, biased[i]]).to(row.dtype)
        row[banned_ids[i, banned[i]]] = torch.finfo(row.dtype).min


def _without_broken(logits: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    """Whatever is drawn from a broken row is thrown away, but it must not break the step of the others."""
    return logits if bool(finite.all()) else logits.masked_fill(finite.logical_not().unsqueeze(1), 0.0)
