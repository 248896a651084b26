"""Weights into and out of a divided model under Hugging Face names, a tensor at a time, bit by bit as they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from forerun.checkpoint.reader import CheckpointReader
from forerun.engines.megatron.model import Blueprint
from forerun.engines.megatron.version import inner_layer_name
from forerun.errors import ForerunError, UsageError
from forerun.families import declared_depth
from forerun.families.megatron import EMBEDDING, HEAD, MTP, Entry, entries, join, split
from forerun.models.layout import split as split_stacked
from forerun.models.weight_stream import Named, WeightStream

_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")
_INNER_LAYER = ".transformer_layer."  # of the table, which has megatron-core 0.16's names


def load_weights(chunks: Sequence[nn.Module], source: CheckpointReader | Iterable[Named]) -> None:
    """Fill this rank's chunks. Of a checkpoint's files only what this rank holds is read.

    Args:
        source: a checkpoint, or every weight under its Hugging Face name, whole, in any order (experts stacked or
            apart). Weights are taken one by one.

    Raises:
        UsageError: a weight is missing, has another shape, is quantised, or has no place in the model.
    """
    holding = _Holding(chunks)
    blueprint = holding.blueprint
    table = {entry.megatron: entry for entry in _table(blueprint)}
    part_of = {name: entry for entry in table.values() for name in entry.hugging_face}
    wanted = {name for tensor_name in holding.tensors for name in table[tensor_name].hugging_face}
    pending: dict[str, dict[str, Tensor]] = {}
    left = dict(holding.tensors)
    for name, tensor in _parts(blueprint, source, wanted, part_of):
        if name not in wanted:
            continue
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise UsageError(f"{name} is quantised ({tensor.dtype}): give a checkpoint whose weights are not")
        entry = part_of[name]
        parts = pending.setdefault(entry.megatron, {})
        parts[name] = tensor
        if len(parts) == len(entry.hugging_face):
            del pending[entry.megatron]
            for place in left.pop(entry.megatron, []):
                _fill(place, entry, [parts[part] for part in entry.hugging_face], blueprint)
    if left:
        entry = table[next(iter(left))]
        there = pending.get(entry.megatron, {})
        missing = next(name for name in entry.hugging_face if name not in there)
        raise UsageError(f"{missing} is missing ({len(left)} weights in all): restore it, or correct config.json")
    if blueprint.depths and blueprint.family.trunk_hidden == "pre_norm":
        for place in holding.tensors.get("decoder.final_layernorm.weight", ()):
            if not bool(place.tensor.all()):
                raise UsageError(
                    "the trunk's final norm has a zero weight: this family's MTP block reads the hidden before that "
                    "norm, which cannot be told from what comes after it"
                )


def named_weights(
    chunks: Sequence[nn.Module],
    *,
    split_experts: bool = False,
    drafter_only: bool = False,
    described: Sequence[Named] | None = None,
) -> WeightStream:
    """Every weight, whole, under its Hugging Face name, tied ones once, the MTP layers' last. Every rank gets all.

    Collective: all ranks call it and go through it to the end. One weight (of experts: one layer's) is whole at a time.

    Args:
        split_experts: experts come apart, as files hold them, and not stacked as modules do.
        drafter_only: the MTP layers' alone; nothing else is sent.
        described: what an earlier call for these chunks described, which takes time to work out.
    """
    holding = _Holding(chunks)
    found = [each for each in _found(holding) if not drafter_only or each.entry.megatron.startswith(MTP)]

    stand_ins = ((each.entry, each.described()) for each in found)
    return WeightStream(
        _named(holding.blueprint, stand_ins, split_experts) if described is None else described,
        _named(holding.blueprint, _whole_tensors(holding, found), split_experts),
    )


def _named(blueprint: Blueprint, tensors: Iterable[tuple[Entry, Tensor]], split_experts: bool) -> Iterator[Named]:
    """Megatron-Core's whole tensors, in the table's order, under Hugging Face names."""
    shape = blueprint.shape
    stacks: dict[str, Tensor] = {}
    for entry, tensor in tensors:
        if entry.expert is None or split_experts:
            yield from zip(entry.hugging_face, split(entry, tensor, shape.heads, shape.groups), strict=True)
            del tensor  # or it would be there while the next one is made
            continue
        name = _stacked_name(blueprint, entry)
        if name not in stacks:
            stacks[name] = tensor.new_empty((shape.experts, *tensor.shape))
        stacks[name][entry.expert] = tensor
        if entry.expert == shape.experts - 1:
            yield name, stacks.pop(name)


def file_weights(chunks: Sequence[nn.Module], names: Iterable[str] | None = None) -> Iterator[Named]:
    """`named_weights` as files hold them: experts apart, and copies of embedding and LM head for the MTP layers.

    Args:
        names: of a checkpoint; copies are as there. None: those that the family's files always have.
    """
    blueprint = _Holding(chunks).blueprint
    written = {
        blueprint.family.duplicate_name(copy, k, blueprint.shape.layers)
        for k in range(blueprint.depths)
        for copy in blueprint.family.duplicates
        if copy.written
    }
    copies = _copies(blueprint)
    kept = written if names is None else copies.keys() & set(names)
    for name, tensor in named_weights(chunks, split_experts=True):
        yield name, tensor
        for copy in sorted(kept):
            if copies[copy] == name:
                yield copy, tensor.clone()  # safetensors refuses one tensor under two names


@dataclass(frozen=True)
class _Place:
    """A tensor of this rank.

    Attributes:
        tensor: the parameter or buffer.
        dim: which of its dimensions is divided over ranks; None is none.
    """

    tensor: Tensor
    dim: int | None


@dataclass(frozen=True)
class _About:
    """What a rank must know of a tensor to receive the whole of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None

    @classmethod
    def of(cls, place: _Place) -> _About:
        return cls(tuple(place.tensor.shape), place.tensor.dtype, place.dim)

    def empty(self, entry: Entry, device: str | int) -> Tensor:
        shape = list(self.shape)
        if self.dim is not None:
            shape[self.dim] *= _divided_over(entry).size()
        return torch.empty(shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class _Found:
    """A tensor of the whole model: its entry, what it is, and which pipeline stage has it."""

    entry: Entry
    about: _About
    stage: int
    rows: int | None  # without padding; None: as they are

    def described(self) -> Tensor:
        return self.about.empty(self.entry, "meta")[: self.rows]


class _Holding:
    """What this rank holds of a model, under Megatron-Core's names in the whole model.

    Attributes:
        blueprint: the model's.
        tensors: name -> places; a second chunk may hold a copy.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.tensors: dict[str, list[_Place]] = {}
        for wrapped in chunks:
            chunk: Any = wrapped
            while not hasattr(chunk, "blueprint"):  # data parallelism wraps it
                chunk = chunk.module
            self.blueprint: Blueprint = chunk.blueprint
            saved = chunk.state_dict(keep_vars=True).keys()
            for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
                if name in saved:
                    divided = getattr(tensor, "tensor_model_parallel", False)
                    place = _Place(tensor.detach(), tensor.partition_dim if divided else None)
                    self.tensors.setdefault(self._whole_name(chunk, name), []).append(place)

    def _whole_name(self, chunk: Any, name: str) -> str:
        kind, *rest = name.split(".")
        if kind == "decoder" and rest[0] == "layers":
            rest[1] = str(chunk.decoder.layers[int(rest[1])].layer_number - 1)
        whole = ".".join((kind, *rest)).replace(f".{inner_layer_name()}.", _INNER_LAYER)
        if self.blueprint.tied and whole == HEAD:
            return EMBEDDING
        first = parallel_state.get_expert_model_parallel_rank() * self._local_experts()
        return _EXPERT.sub(lambda found: str(first + int(found[0])), whole)

    def _local_experts(self) -> int:
        return self.blueprint.shape.experts // self.blueprint.layout.expert_model_parallel_size

    def counterpart(self, entry: Entry) -> str:
        """What this expert-parallel rank has in the place of the entry's tensor, its own where it has it."""
        if entry.expert is None:
            return entry.megatron
        local = self._local_experts()
        own = parallel_state.get_expert_model_parallel_rank() * local + entry.expert % local
        return _EXPERT.sub(str(own), entry.megatron)

    def expert_rank(self, entry: Entry) -> int | None:
        """Which expert-parallel rank has it; None where all have."""
        return None if entry.expert is None else entry.expert // self._local_experts()


def _table(blueprint: Blueprint) -> Iterator[Entry]:
    for entry in entries(blueprint.family, blueprint.shape, blueprint.depths):
        if not (blueprint.tied and entry.megatron == HEAD):
            yield entry


def _parts(
    blueprint: Blueprint,
    source: CheckpointReader | Iterable[Named],
    wanted: set[str],
    known: Mapping[str, Entry],
) -> Iterator[Named]:
    """(name, tensor) with experts apart; of a checkpoint only what is wanted.

    Raises:
        UsageError: one has no place in the model, or a copy differs from what it copies.
    """
    family, shape = blueprint.family, blueprint.shape
    copies = _copies(blueprint) | ({"lm_head.weight": "model.embed_tokens.weight"} if blueprint.tied else {})
    declared = declared_depth(family, blueprint.config) or 0

    def skipped(name: str) -> bool:
        block_unused = blueprint.depths == 0 and family.owns(name, declared, shape.layers)
        return name in copies or name.endswith("rotary_emb.inv_freq") or block_unused

    def read(reader: CheckpointReader) -> Iterator[Named]:
        for name in sorted(reader.tensor_names):
            apart = family.piece_names(name, shape.experts)
            names = {part for parts in apart for part in parts} if apart else {name}
            if names & wanted or not names <= known.keys() | copies.keys():
                yield name, reader.tensor(name)
            elif (of := copies.get(name)) in wanted and not torch.equal(reader.tensor(name), reader.tensor(of)):
                raise UsageError(f"{name} differs from {of}, of which it should be a copy: remove it from the files")

    for name, tensor in read(source) if isinstance(source, CheckpointReader) else source:
        for part_name, part in () if skipped(name) else split_stacked(name, tensor, family):
            if part_name not in known:
                raise UsageError(
                    f"{part_name} has no place in megatron-core's GPTModel for this config.json: the two do not belong "
                    "together, or the model has parts that the table of names lacks"
                )
            yield part_name, part


def _copies(blueprint: Blueprint) -> dict[str, str]:
    """Name of the MTP layers' copies of embedding and LM head -> name of what they copy."""
    family = blueprint.family
    of = {"embedding": "model.embed_tokens.weight"}
    of["head"] = of["embedding"] if blueprint.tied else "lm_head.weight"
    return {
        family.duplicate_name(copy, k, blueprint.shape.layers): of[copy.of]
        for k in range(blueprint.depths)
        for copy in family.duplicates
    }


def _fill(place: _Place, entry: Entry, parts: Sequence[Tensor], blueprint: Blueprint) -> None:
    group = _divided_over(entry)
    try:
        whole = join(entry, parts, blueprint.shape.groups)
        if entry.megatron in (EMBEDDING, HEAD) and len(whole) == blueprint.vocab_size:
            padding = len(place.tensor) * group.size() - len(whole)
            whole = torch.cat([whole, whole.new_zeros(padding, *whole.shape[1:])])
        shards = _shards(entry, whole, place.dim, group.size())
        fits = place.tensor.shape == shards[group.rank()].shape
    except (RuntimeError, IndexError, ValueError):  # torch's, of shapes that do not divide
        fits = False
    if not fits:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise UsageError(
            f"{entry.hugging_face[0]} has shape {shapes}, which config.json does not imply: the two do not belong "
            "together"
        )
    place.tensor.copy_(shards[group.rank()])


def _divided_over(entry: Entry) -> dist.ProcessGroup:
    if entry.expert is None:
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_tensor_parallel_group()


def _shards(entry: Entry, whole: Tensor, dim: int | None, size: int) -> list[Tensor]:
    """What each rank of tensor parallelism holds of a whole tensor."""
    if dim is None or size == 1:
        return [whole] * size
    if entry.how == "rows":  # each has its share of both
        first, second = (part.chunk(size) for part in whole.chunk(2))
        return [torch.cat(pair) for pair in zip(first, second, strict=True)]
    return list(whole.chunk(size, dim=dim))


def _joined(entry: Entry, shards: Sequence[Tensor], dim: int) -> Tensor:
    """What `_shards` divided."""
    if entry.how == "rows":
        return torch.cat(
            [half for halves in zip(*(shard.chunk(2) for shard in shards), strict=True) for half in halves]
        )
    return torch.cat(list(shards), dim=dim)


def _found(holding: _Holding) -> Iterator[_Found]:
    """Megatron-Core's tensors of the whole model in the table's order."""
    blueprint = holding.blueprint
    stages = parallel_state.get_pipeline_model_parallel_group()
    # Name -> (shape, dtype, divided dimension), of each stage; expert-parallel ranks have the same but for numbers.
    own = {name: _About.of(places[0]) for name, places in holding.tensors.items()}
    about: list[dict[str, _About]] = [own] * stages.size()
    if stages.size() > 1:
        dist.all_gather_object(about, own, group=stages)
    for entry in _table(blueprint):
        name = holding.counterpart(entry)
        stage = next((stage for stage, names in enumerate(about) if name in names), None)
        if stage is None:
            continue  # one that not every model has: `load_weights` has filled whatever there is
        rows = blueprint.vocab_size if entry.megatron in (EMBEDDING, HEAD) else None
        yield _Found(entry, about[stage][name], stage, rows)


def _whole_tensors(holding: _Holding, found: Iterable[_Found]) -> Iterator[tuple[Entry, Tensor]]:
    """These, on every rank, without padding."""
    stages = parallel_state.get_pipeline_model_parallel_group()
    for each in found:
        whole: Tensor | None = None
        if each.stage == stages.rank():
            whole = _of_stage(holding, each.entry, each.about)
        if stages.size() > 1:
            whole = each.about.empty(each.entry, _device()) if whole is None else whole
            dist.broadcast(whole, group=stages, group_src=each.stage)
        assert whole is not None
        yield each.entry, whole[: each.rows]


def _of_stage(holding: _Holding, entry: Entry, about: _About) -> Tensor:
    owner = holding.expert_rank(entry)
    experts = parallel_state.get_expert_model_parallel_group()
    whole: Tensor | None = None
    if owner in (None, experts.rank()):
        place, group = holding.tensors[entry.megatron][0], _divided_over(entry)
        whole = place.tensor.contiguous()
        if place.dim is not None and group.size() > 1:
            shards = [torch.empty_like(whole) for _ in range(group.size())]
            dist.all_gather(shards, whole, group=group)
            whole = _joined(entry, shards, place.dim)
    if owner is not None and experts.size() > 1:
        whole = about.empty(entry, _device()) if whole is None else whole
        dist.broadcast(whole, group=experts, group_src=owner)
    assert whole is not None
    return whole


def _device() -> str | int:
    return torch.cuda.current_device() if torch.cuda.is_available() else "cpu"


def _stacked_name(blueprint: Blueprint, entry: Entry) -> str:
    """Under which name modules hold an expert's tensor, stacked with the other experts'."""
    for end, parts in blueprint.family.pieces:
        first = parts[0].format(e=entry.expert)
        if entry.hugging_face[0].endswith(first):
            return entry.hugging_face[0].removesuffix(first) + end
    raise ForerunError(f"family {blueprint.family.name} has no stack for {entry.hugging_face[0]}: report this as a bug")
