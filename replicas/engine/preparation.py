"""What a GPU needs before its arena is cut, and what memory steps take there; begun while weights load."""

import os
from typing import TYPE_CHECKING

import torch

from hybridserve.replicas.arena.layout import ArenaLayout
from hybridserve.replicas.engine.config import EngineConfig
from hybridserve.replicas.engine.placement import Placement
from hybridserve.replicas.engine.startup import StartupReport
from hybridserve.replicas.models.specs import ModelConfig

if TYPE_CHECKING:
    from hybridserve.replicas.runner.rehearsal import RehearsedModel

LOGIT_BYTES = 4
GRAPH_RESERVE = 768 * 2**20
"""For what graphs hold beside logits: a decode step's intermediates, cuBLAS' workspaces."""


class Preparation:
    """What a GPU needs before its arena is cut, begun before the weights are there."""

    def __init__(
        self,
        model: "RehearsedModel",
        model_config: ModelConfig,
        layout: ArenaLayout,
        placement: Placement,
        config: EngineConfig,
        budget: int,
        report: StartupReport,
    ) -> None:
        """Look for the kernels and start to compile them."""
        # both import Triton, which a CPU's engine can do without
        from hybridserve.kernels.compilation import Compilation
        from hybridserve.replicas.runner.rehearsal import Rehearsal

        self._device = placement.device
        self._report = report
        self._logits_bytes = config.max_num_seqs * model_config.vocab_size * LOGIT_BYTES
        self._graphs = not config.enforce_eager
        report.memory["weights"] = torch.cuda.memory_allocated(self._device)
        with report.part("rehearsal"):
            # weights are not there yet, but their tensors are
            model.finish_loading()
            self._rehearsal = Rehearsal(
                model,
                model_config,
                layout,
                placement.dtype,
                placement.device,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=budget,
                max_model_len=config.max_model_len or model_config.max_position_embeddings,
            )
            self._compilation = Compilation(self._rehearsal.launches(), os.cpu_count() or 1)
        report.compiled_kernels = self._compilation.num_kernels

    def finish(self) -> None:
        """Wait for the kernels; run the largest steps and note what memory they take beside weights."""
        with self._report.part("kernels"):
            self._rehearsal.build_plans()
            self._compilation.wait()
        with self._report.part("profile"):
            held = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._rehearsal.run()
            torch.cuda.synchronize(self._device)
            used = torch.cuda.max_memory_allocated(self._device) - held
            del self._rehearsal
            torch.cuda.empty_cache()
        # logits of all sequences at once, and a copy while they are edited, are in no step that was run
        self._report.memory["workspace"] = used + 2 * self._logits_bytes
        if self._graphs:
            self._report.memory["graphs"] = self._logits_bytes + GRAPH_RESERVE
