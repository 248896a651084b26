"""Runs in vLLM's worker: takes weights for the trunk and the drafter bucket by bucket, and reads the drafter's back.

vLLM makes its worker class inherit from `ForerunWorker` (`--worker-extension-cls forerun_worker.ForerunWorker`).
Arguments and answers are plain JSON values, and an answer is {"value": ...} or {"error": one line}.

Kernels may hold weights in a form of their own, so they go in as vLLM's own `reload_weights` puts them: layer by layer,
through its loaders, packed anew. Read in vLLM 0.32: model_executor/model_loader/reload/{inplace,layerwise,meta}.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Set
from typing import Any

import forerun_cpu_sampling
import torch
from forerun_digest import drafter_digest
from forerun_packing import renew, unpad
from safetensors import safe_open
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

forerun_cpu_sampling.mend()  # vLLM's worker imports this file before it samples anything


class Refused(Exception):
    """What cannot be done, in one line."""


def answered(method: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(method)
    def answer(worker: ForerunWorker, *args: Any) -> dict[str, Any]:
        try:
            # As vLLM's own worker does when it loads: layers look the configuration up.
            with torch.no_grad(), set_current_vllm_config(worker.vllm_config):
                return {"value": method(worker, *args)}
        except Exception as error:  # an exception that left here could end the engine
            kind = "" if isinstance(error, Refused) else f"{type(error).__name__}: "
            return {"error": kind + " ".join(str(error).split())}

    return answer


class ForerunWorker:
    """Methods for vLLM's worker; all names begin with forerun_, as they must not meet vLLM's own."""

    vllm_config: Any
    model_config: Any
    get_model: Callable[[], nn.Module]
    get_draft_model: Callable[[], nn.Module | None]

    forerun_version = 0
    forerun_whole = True  # no update was left half done
    forerun_part: str | None = None  # which of the two models is being loaded
    forerun_awaited: Set[str] = frozenset()  # its parameters that no bucket has filled yet

    @answered
    def forerun_describe(self) -> dict[str, Any]:
        """What the engine serves."""
        speculative = self.vllm_config.speculative_config
        return {
            "model": self.model_config.model,
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "wider_parameters": sorted(self.forerun_wider_parameters()),
            "max_model_len": self.model_config.max_model_len,
            "logprobs_mode": self.model_config.logprobs_mode,
            "num_speculative_tokens": 0 if speculative is None else speculative.num_speculative_tokens,
            "has_tokenizer": not self.model_config.skip_tokenizer_init,
            "can_sleep": bool(self.model_config.enable_sleep_mode),
            "spec_metrics": self.vllm_config.observability_config.per_request_spec_decode_metrics,
            "weight_version": self.forerun_version,
            "whole": self.forerun_whole,
        }

    @answered
    def forerun_start_update(self) -> None:
        """From here to `forerun_finish_update` the weights are mixed."""
        self.forerun_whole = False
        self.forerun_close_part(check=False)

    @answered
    def forerun_load_bucket(self, part: str, path: str) -> None:
        """Load a safetensors file into the "trunk" or the "drafter". A part's buckets follow one another."""
        if self.forerun_part != part:
            self.forerun_close_part(check=True)
            model = self.forerun_model(part)
            shared = set() if part == "trunk" else {id(parameter) for parameter in self.get_model().parameters()}
            self.forerun_part = part
            self.forerun_awaited = {name for name, tensor in model.named_parameters() if id(tensor) not in shared}
            unpad(model)
            initialize_layerwise_reload(model)
        with disable_mtp_completeness_check():
            loaded = self.forerun_model(part).load_weights(_tensors(path))
        self.forerun_awaited = self.forerun_awaited - (loaded or set())

    @answered
    def forerun_finish_update(self, version: int) -> None:
        """All buckets are there."""
        self.forerun_close_part(check=True)
        self.forerun_version, self.forerun_whole = version, True

    @answered
    def forerun_abandon_update(self) -> None:
        """Leave a model that runs, though with mixed weights."""
        self.forerun_close_part(check=False)

    @answered
    def forerun_drafter_digest(self, layout: list[Any]) -> dict[str, str | None]:
        """See `forerun_digest.drafter_digest`."""
        parallel = self.vllm_config.parallel_config
        return drafter_digest(self.get_draft_model(), layout, self.model_config.dtype, parallel)

    def forerun_wider_parameters(self) -> set[str]:
        """Those held in a wider dtype than the model's."""
        size = self.model_config.dtype.itemsize
        models = [model for model in (self.get_model(), self.get_draft_model()) if model is not None]
        named = [pair for model in models for pair in model.named_parameters()]
        return {name for name, tensor in named if tensor.is_floating_point() and tensor.itemsize > size}

    def forerun_model(self, part: str) -> Any:
        model = self.get_model() if part == "trunk" else self.get_draft_model()
        if model is None:
            raise Refused("vLLM runs without a drafter: launch it with num_speculative_tokens above 0")
        return model

    def forerun_close_part(self, check: bool) -> None:
        """Put a model that was being loaded together again; `check`: all of it must have come."""
        if self.forerun_part is None:
            return
        part, self.forerun_part = self.forerun_part, None
        model = self.forerun_model(part)
        drafter = self.vllm_config.speculative_config
        finalize_layerwise_reload(model, self.model_config if part == "trunk" else drafter.draft_model_config)
        if not check:
            return
        if self.forerun_awaited:
            raise Refused(
                f"vLLM left {len(self.forerun_awaited)} weights of the {part} as they were, first "
                f"{min(self.forerun_awaited)}"
            )
        renew(model)


def _tensors(path: str) -> Iterator[tuple[str, Tensor]]:
    # One at a time, and off the file's pages: vLLM keeps what it waits with, and the file is to be gone soon.
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dictionary
            yield name, file.get_tensor(name).clone()
