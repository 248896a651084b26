"""Runs in vLLM's worker, in the place of forerun_worker.py: what a fault in one of several does to its drafter."""

from __future__ import annotations

from typing import Any

from forerun_worker import ForerunWorker, answered


class TamperedWorker(ForerunWorker):
    rank: int

    @answered
    def forerun_scale(self, rank: int, ending: str, factor: float) -> None:
        """Multiply the parameter of that worker's drafter whose name ends so."""
        (parameter,) = (each for name, each in self._drafter().named_parameters() if name.endswith(ending))
        if self.rank == rank:
            parameter.mul_(factor)

    @answered
    def forerun_hide_experts(self, rank: int) -> None:
        """Have that worker's experts look as if kernels with an order of their own had them."""
        if self.rank == rank:
            for layer in self._drafter().modules():
                if hasattr(layer, "w2_weight"):
                    layer.quant_method.moe_kernel.fused_experts._use_zentorch = True

    def _drafter(self) -> Any:
        return self.get_draft_model()
