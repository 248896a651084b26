"""The model runner: trunk, LM head and drafter in the engine's own copy, run over the key-value cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.errors import ForerunError, UsageError
from forerun.models.carrier import MTPCarrier, mtp_weight_names, named_weights
from forerun.models.trunk import UndoNorm, base_model
from forerun.mtp.block import MTPBlock, MTPLayer
from forerun.rollout.native.cache import DecodeStep, KVCache, PrefillStep, Rotary, Step
from forerun.rollout.native.layers import FusedDecoderLayer, WeightCopies
from forerun.rollout.native.products import Choice, ProductTable, TunedLinear
from forerun.speculative.drafter import Drafter

# Rotary embeddings whose factors depend on more than the position cannot be tabulated.
_TABULATED_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
_CHECK_TOKENS = 12
# Largest difference to the model's own logits that rounding explains, relative to their standard deviation.
_CHECK_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2, torch.bfloat16: 0.25, torch.float16: 0.05}


class ModelRunner:
    """A Llama-like causal LM (RMS norms, rotary embedding, gated MLP, optional q and k norms), and its MTP block.

    Args:
        model: the Hugging Face model to copy; not kept.
        dtype: of the copy.
        device: of the copy.
        draft_vocabulary: token ids to which drafting is restricted; None is all.
        products: how small matrix products are chosen, see `native.products`.

    Raises:
        UsageError: the model is of a kind that this runner does not compute.
        ForerunError: the copy does not give the model's own logits.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype,
        device: torch.device,
        draft_vocabulary: Tensor | None,
        products: Choice,
    ) -> None:
        self.dtype, self.device = dtype, device
        self.table = ProductTable(products)
        copies = WeightCopies(dtype, device, self.table)
        trunk: Any = base_model(model)
        _check_kind(model, trunk)
        self.config = trunk.config
        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        try:
            self.layers = [FusedDecoderLayer(layer, i, copies) for i, layer in enumerate(trunk.layers)]
            self.norm = copies.norm(trunk.norm)
        except AttributeError as error:
            raise UsageError(
                f"the native engine runs Llama-like models and {type(model).__name__} is none ({error}): "
                "use another rollout backend"
            ) from error
        self.embedding = copies.copy(trunk.get_input_embeddings().weight)
        head: Any = model.get_output_embeddings()
        shared = copies.view_of(head.weight)
        if shared is None:
            self.head = copies.linear(head)
        else:
            self.head = TunedLinear(shared, None if head.bias is None else copies.copy(head.bias), self.table)
        self._rotary_module = copy.deepcopy(trunk.rotary_emb).to(device)
        self.block: MTPBlock | None = None
        if isinstance(model, MTPCarrier):
            undo_norm = None if model.mtp.undo_norm is None else UndoNorm(self.norm)
            self.block = _copy_block(model.mtp, len(self.layers), copies, undo_norm)
        self.draft_vocabulary = _sorted_vocabulary(draft_vocabulary, self.vocab_size, device)
        self.draft_head = self._make_draft_head()
        self.weights = _name_weights(model, copies)
        self.drafter_names = tuple(mtp_weight_names(model).values()) if isinstance(model, MTPCarrier) else ()
        self.drafter: Drafter | None = None
        if self.block is not None and len(self.block.layers) == 1:
            self.drafter = Drafter(self.block, self.embed, self.draft_head, self._drafter_kwargs, self.draft_vocabulary)
        self.cache: KVCache | None = None
        self._rotary: Rotary | None = None
        self._check_against(model)

    # Memory

    @property
    def rewinds(self) -> bool:
        """Whether `copy_row` can copy a row as it stood when it was shorter (keys and values can, a state cannot)."""
        return True

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the cache that one position of one row takes."""
        layer = self.layers[0]
        return 2 * self._cache_layers * layer.kv_heads * layer.head_dim * self.dtype.itemsize

    @property
    def _cache_layers(self) -> int:
        return len(self.layers) + (len(self.block.layers) if self.block is not None else 0)

    def allocate(self, rows: int, capacity: int) -> None:
        """Give the caches this size; what the rows hold is kept."""
        if self.cache is not None and (self.cache.rows, self.cache.capacity) == (rows, capacity):
            return
        if self.cache is not None:
            self.cache.resize(rows, capacity)
        else:
            layer = self.layers[0]
            self.cache = KVCache(
                self._cache_layers, rows, layer.kv_heads, capacity, layer.head_dim, self.dtype, self.device
            )
        positions = torch.arange(capacity, device=self.device)[None]
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        cos, sin = self._rotary_module(like, positions)
        self._rotary = Rotary(cos[0], sin[0])

    def release(self) -> None:
        """Free the caches."""
        self.cache = None
        self._rotary = None

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Make row `target` stand where row `source` stands, `length` tokens in."""
        assert self.cache is not None
        self.cache.copy_row(source, target, length)

    def commit(self, kept: Sequence[int]) -> None:
        """After a `decode` of T tokens for rows 0..R-1: row r keeps its first kept[r] >= 1, the others never were.

        Keys and values need nothing done: what lies behind a row's length is overwritten before it is attended to.
        """

    def tune(self) -> None:
        """Choose how the matrix products are computed; the first time takes seconds on a CPU."""
        self.table.prepare()

    # Computation

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding)

    def decode(self, tokens: Tensor, positions: Tensor, live: int, uniform: bool) -> Tensor:
        """tokens, positions long [R, T] at the end of rows 0..R-1 -> hiddens [R, T, d] that the LM head takes."""
        return self._trunk(tokens, self._decode_step(positions, live, uniform))

    def prefill(self, tokens: Tensor, next_tokens: Tensor | None, pieces: list[tuple[int, int, int]]) -> Tensor:
        """Pieces of prompts, tokens long [1, N] end to end -> hiddens [1, N, d].

        With `next_tokens` [1, N] the drafter's cache is fed, too; where the next token is not known yet any id will do,
        as that entry is written again by the first draft.
        """
        assert self.cache is not None and self._rotary is not None
        step = PrefillStep(self.cache, self._rotary, pieces)
        hidden_states = self._trunk(tokens, step)
        if next_tokens is not None and self.block is not None:
            self.block.step(1, hidden_states, self.embed(next_tokens), step=step)
        return hidden_states

    def feed(self, hidden_states: Tensor, next_tokens: Tensor, pieces: list[tuple[int, int, int]]) -> None:
        """Feed the drafter's cache what the trunk alone has seen: pieces of rows end to end, hiddens [1, N, d] and the
        token after each, long [1, N]."""
        assert self.cache is not None and self._rotary is not None and self.block is not None
        step = PrefillStep(self.cache, self._rotary, pieces)
        self.block.step(1, hidden_states, self.embed(next_tokens), step=step)

    def _drafter_kwargs(self, positions: Tensor, live: int) -> dict[str, Any]:
        return {"step": self._decode_step(positions, live, uniform=positions.shape[0] == 1)}

    def _decode_step(self, positions: Tensor, live: int, uniform: bool) -> DecodeStep:
        assert self.cache is not None and self._rotary is not None
        layer = self.layers[0]
        return DecodeStep(self.cache, self._rotary, positions, live, uniform, layer.heads // layer.kv_heads)

    def _trunk(self, tokens: Tensor, step: Step) -> Tensor:
        hidden_states = self.embed(tokens)
        for layer in self.layers:
            hidden_states = layer(hidden_states, step=step)
        return self.norm(hidden_states)

    # Weights

    def refresh(self) -> None:
        """After the weights changed: remake or drop what was derived from them."""
        self.table.drop_packed()
        if self.draft_vocabulary is not None:
            self.draft_head.weight.copy_(self.head.weight[self.draft_vocabulary])
            if self.head.bias is not None and self.draft_head.bias is not None:
                self.draft_head.bias.copy_(self.head.bias[self.draft_vocabulary])

    def _make_draft_head(self) -> TunedLinear:
        if self.draft_vocabulary is None:
            return self.head
        bias = None if self.head.bias is None else self.head.bias[self.draft_vocabulary]
        return TunedLinear(self.head.weight[self.draft_vocabulary], bias, self.table)

    @torch.no_grad()
    def _check_against(self, model: PreTrainedModel) -> None:
        """Compare with the model's own forward on a few tokens: what a config does not say shows here."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.vocab_size, (1, _CHECK_TOKENS), generator=generator)
        training = model.training
        model.eval()
        theirs = model(tokens.to(model.device)).logits[0].to("cpu", torch.float64)
        model.train(training)
        self.allocate(1, _CHECK_TOKENS)
        hidden_states = self.prefill(tokens.to(self.device), None, [(0, 0, _CHECK_TOKENS)])
        ours = self.head(hidden_states)[0].to("cpu", torch.float64)
        self.release()
        error = ((ours - theirs).abs().max() / theirs.std().clamp(min=1e-30)).item()
        if not error <= _CHECK_TOLERANCE[self.dtype]:
            raise ForerunError(
                f"the native engine's logits differ from {type(model).__name__}'s by {error:.2g} standard deviations: "
                "it does not compute this model; use another rollout backend"
            )


def _check_kind(model: PreTrainedModel, trunk: Any) -> None:
    config = trunk.config
    layer_types = set(getattr(config, "layer_types", None) or ())
    sliding = not layer_types and getattr(config, "sliding_window", None) is not None
    if sliding or layer_types - {"full_attention"}:
        kinds = ", ".join(sorted(layer_types)) or "sliding_attention"
        raise UsageError(f"the native engine runs full attention only, and this model has {kinds}: use another backend")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _TABULATED_ROPE:
        raise UsageError(f"the native engine has no rotary embedding of type {rope!r}: use another rollout backend")
    if not hasattr(trunk, "layers") or not hasattr(trunk, "rotary_emb"):
        raise UsageError(f"the native engine runs Llama-like models and {type(model).__name__} is none")


def _copy_block(block: MTPBlock, first_cache_layer: int, copies: WeightCopies, undo_norm: UndoNorm | None) -> MTPBlock:
    """The same block, made of the engine's layers; `MTPBlock.step` is the one definition of what it computes."""
    layers = []
    for k, layer in enumerate(block.layers):
        assert isinstance(layer, MTPLayer)
        made = MTPLayer.__new__(MTPLayer)
        nn.Module.__init__(made)
        made.concat_order = layer.concat_order
        made.hidden_norm = copies.norm(layer.hidden_norm)
        made.embed_norm = copies.norm(layer.embed_norm)
        made.proj = copies.linear(layer.proj)  # type: ignore[assignment]
        made.decoder = FusedDecoderLayer(layer.decoder, first_cache_layer + k, copies)
        made.final_norm = nn.Identity() if isinstance(layer.final_norm, nn.Identity) else copies.norm(layer.final_norm)
        layers.append(made)
    return MTPBlock(layers, block.num_depths, block.recurrence, undo_norm)


def _sorted_vocabulary(vocabulary: Tensor | None, size: int, device: torch.device) -> Tensor | None:
    if vocabulary is None:
        return None
    words = torch.as_tensor(vocabulary, dtype=torch.long).unique()
    if len(words) == 0 or int(words[0]) < 0 or int(words[-1]) >= size:
        raise UsageError(f"the draft vocabulary must hold token ids from 0 to {size - 1}, and at least one")
    return words.to(device)


def _name_weights(model: PreTrainedModel, copies: WeightCopies) -> dict[str, Tensor]:
    weights = {}
    for name, weight in named_weights(model):
        view = copies.view_of(weight)
        if view is None:
            raise UsageError(f"the native engine has no place for the weight {name}: use another rollout backend")
        weights[name] = view
    return weights
