"""Models built by forerun.engines.megatron on ranks of a CPU: `python -m tests.engines.megatron_model FOLDER`.

FOLDER holds checkpoints CASE/, settings.json (layout -> sizes and cases) and rows.safetensors. Each layout's processes
are forked, so that megatron-core is imported once. They leave, per layout and case, a folder LAYOUT-CASE with what
`file_weights` gave on the last rank (model.safetensors), what `named_weights` gave on the first (named.safetensors),
and where no pipeline divides the model the logits of trunk and depths (logits.safetensors) and the gradients of their
weighted sum (gradients.safetensors).
"""

from __future__ import annotations

import json
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engines import megatron_cpu

warnings.filterwarnings("ignore")  # about Transformer Engine and Apex, which are not there
megatron_cpu.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, random  # noqa: E402

from forerun.checkpoint.reader import CheckpointReader  # noqa: E402
from forerun.engines.megatron.layout import ParallelLayout  # noqa: E402
from forerun.engines.megatron.model import build_model  # noqa: E402
from forerun.engines.megatron.weights import file_weights, load_weights, named_weights  # noqa: E402
from forerun.errors import ForerunError  # noqa: E402
from forerun.mtp.config import MTPConfig  # noqa: E402
from tests.engines.megatron_checkpoints import CASES, weigh  # noqa: E402


def logits(chunk: Any, input_ids: Tensor) -> dict[int, Tensor]:
    """depth -> [B, S, V] from megatron-core's own forward, which computes those of the MTP depths for its loss only."""
    found: list[Tensor] = []
    # A copy: the cross-entropy works in its place.
    hook = chunk.output_layer.register_forward_hook(lambda _, __, out: found.append(out[0].clone()))
    length = input_ids.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).triu(1).expand(len(input_ids), 1, -1, -1)
    positions = torch.arange(length).expand_as(input_ids)
    chunk.eval()(input_ids, positions, mask, labels=input_ids, loss_mask=torch.ones(input_ids.shape))
    hook.remove()
    *depths, trunk = (gather_from_tensor_model_parallel_region(x).transpose(0, 1) for x in found)
    return {depth: x[..., : chunk.blueprint.vocab_size] for depth, x in enumerate((trunk, *depths))}


@torch.no_grad()
def gradients(chunk: Any) -> dict[str, Tensor]:
    """Under Hugging Face names, after a backward pass: the way that weights take."""
    group, experts = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_model_parallel_group()
    for name, parameter in chunk.named_parameters():
        assert parameter.grad is not None, name
        if getattr(parameter, "sequence_parallel", False):  # as finalize_model_grads does
            dist.all_reduce(parameter.grad, group=group)
        # All ranks had the same rows, and experts got them from every one.
        parameter.copy_(parameter.grad / (experts.size() if ".experts." in name else 1))
    return {name: tensor.clone() for name, tensor in named_weights([chunk])}


def refusals(folder: Path) -> dict[str, str]:
    """What models and checkpoints that do not go are refused with."""
    configs = {case: CheckpointReader(folder / case).config for case in ("llama-tied", "mimo", "glm4_moe")}
    mtp, one = MTPConfig(enable=True), ParallelLayout()
    tensor, pipeline = ParallelLayout(tensor_model_parallel_size=2), ParallelLayout(pipeline_model_parallel_size=8)
    repeated = MTPConfig(enable=True, num_layers=2, repeat_layer=True)
    llama, mimo, glm = configs.values()
    reader = CheckpointReader(folder / "glm4_moe")
    weights = {name: reader.tensor(name) for name in reader.tensor_names}
    name = "model.layers.1.self_attn.q_proj.weight"

    def load(changed: Mapping[str, Tensor] | CheckpointReader) -> None:
        load_weights(build_model(glm, mtp, one), changed if isinstance(changed, CheckpointReader) else changed.items())

    def load_mimo(changed: Mapping[str, Tensor]) -> None:
        theirs = CheckpointReader(folder / "mimo")
        given = {key: theirs.tensor(key) for key in theirs.tensor_names} | changed
        load_weights(build_model(mimo, mtp, one), given.items())

    copied = folder / "glm4_moe-with-a-copy"
    copied.mkdir()
    (copied / "config.json").write_text(json.dumps(glm))
    other_head = {"model.layers.2.shared_head.head.weight": weights["lm_head.weight"] + 1}
    save_file(weights | other_head, copied / "model.safetensors")
    attempts: dict[str, Callable[[], object]] = {
        "no depth": lambda: build_model(llama | {"num_nextn_predict_layers": 0}, mtp, one),
        "two repeated": lambda: build_model(glm | {"num_nextn_predict_layers": 2}, repeated, one),
        "pre-norm repeated": lambda: build_model(mimo | {"num_nextn_predict_layers": 1}, repeated, one),
        "heads": lambda: build_model(llama | {"num_attention_heads": 1}, mtp, tensor),
        "no sequence parallelism": lambda: build_model(glm, mtp, tensor),
        "stages": lambda: build_model(llama, mtp, pipeline),
        "state": lambda: build_model(llama, mtp, tensor),
        "setting": lambda: build_model(llama, mtp, one, no_such_field=1),
        "config": lambda: build_model(llama | {"vocab_size": "many"}, mtp, one),
        "missing": lambda: load({key: x for key, x in weights.items() if key != name}),
        "shape": lambda: load(weights | {name: weights[name][:-2]}),
        "unknown": lambda: load(weights | {"model.layers.1.self_attn.sinks": torch.ones(2)}),
        "quantised": lambda: load(weights | {name: weights[name].to(torch.float8_e4m3fn)}),
        "zero norm": lambda: load_mimo({"model.norm.weight": torch.zeros(16)}),
        "copy": lambda: load(CheckpointReader(copied)),
    }
    said = {}
    for attempt, call in attempts.items():
        try:
            call()
        except ForerunError as error:
            said[attempt] = f"{type(error).__name__}: {error}"
    return said


def most_held(folder: Path) -> dict[str, int]:
    """Of a checkpoint's tensors that are handed over one by one, how many live at once; and how many there are."""
    reader = CheckpointReader(folder / "glm4_moe")
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for name in sorted(reader.tensor_names):
            tensor = reader.tensor(name)
            alive.append(weakref.ref(tensor))
            most = max(most, sum(reference() is not None for reference in alive))
            yield name, tensor

    load_weights(build_model(reader.config, MTPConfig(enable=True), ParallelLayout()), tensors())
    return {"most": most, "all": len(alive)}


def work(folder: Path, name: str, settings: dict[str, Any]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    layout = ParallelLayout(**settings["layout"])
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=layout.expert_model_parallel_size,
    )
    random.model_parallel_cuda_manual_seed(1)
    if settings.get("refusals"):
        (folder / "held.json").write_text(json.dumps(most_held(folder)))
        (folder / "refusals.json").write_text(json.dumps(refusals(folder)))
    rows = load_file(folder / "rows.safetensors")["input_ids"]
    for case in settings["cases"]:
        mtp = replace(CASES[case].mtp(), mtp_loss_scaling_factor=0.0)  # the test's own sum is all that has a gradient
        reader = CheckpointReader(folder / case)
        dtype = getattr(torch, str(reader.config.get("dtype") or "float32"))
        chunks = build_model(reader.config, mtp, layout, dtype=dtype)
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.fill_(float("nan"))  # whatever is not loaded shows
        load_weights(chunks, reader)
        out = folder / f"{name}-{case}"
        out.mkdir(exist_ok=True)
        whole = {key: tensor.clone() for key, tensor in file_weights(chunks, reader.tensor_names)}
        named = {key: tensor.clone() for key, tensor in named_weights(chunks)}
        if rank == size - 1:
            save_file({key: tensor.contiguous() for key, tensor in whole.items()}, out / "model.safetensors")
        if rank == 0:
            save_file({key: tensor.contiguous() for key, tensor in named.items()}, out / "named.safetensors")
        # Through another engine's names, experts stacked.
        again = build_model(reader.config, mtp, layout, dtype=dtype)
        load_weights(again, named.items())
        for ours, theirs in zip(chunks, again, strict=True):
            for (key, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
                assert not isinstance(a, Tensor) or torch.equal(a, b), key
        if layout.pipeline_model_parallel_size == 1 and dtype == torch.float32:
            found = logits(chunks[0], rows)
            sum(weigh(depth, x) for depth, x in found.items()).backward()
            grads = gradients(chunks[0])
            if rank == 0:
                save_file({str(k): x.detach().contiguous() for k, x in found.items()}, out / "logits.safetensors")
                save_file({name: x.contiguous() for name, x in grads.items()}, out / "gradients.safetensors")


def process(rank: int, size: int, folder: Path, name: str, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{name}", rank=rank, world_size=size)
    work(folder, name, settings)
    dist.destroy_process_group()


def main(folder: Path) -> None:
    (folder / "version").write_text(metadata.version("megatron-core"))
    for name, settings in json.loads((folder / "settings.json").read_text()).items():
        size = settings["ranks"]
        mp.start_processes(process, (size, folder, name, settings), nprocs=size, start_method="fork")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
