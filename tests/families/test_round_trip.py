"""Checkpoints of every family come back bit for bit: ours through a file, and foreign ones through us."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from forerun import MTPConfig, attach, load
from forerun.errors import ForerunError, UsageError
from forerun.families import MIMO
from forerun.models.carrier import MTPCarrier, load_named_weights, named_weights
from tests.families.handmade import COPIES, DECODER, DEPTH_KEY, PARTS, checkpoint, depth_in, mtp_tensors, read, write
from tests.families.tiny import TRUNKS, tiny_trunk
from tests.models.tiny import token_rows

KEEP = MTPConfig(enable=True)
FAMILIES = pytest.mark.parametrize("name", TRUNKS)
EXPERTS = pytest.mark.parametrize(
    "name", ["deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa", "qwen3_next", "qwen3_5_moe", "nemotron_h"]
)


def attached(name: str, **settings: Any) -> MTPCarrier:
    config = MTPConfig(enable=True, num_layers=settings.pop("num_layers", 1))
    return attach(tiny_trunk(name, **settings), config, init="plain", family=MIMO if name == "mimo" else None)


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Same names, dtypes and bits."""
    return ours.keys() == theirs.keys() and all(
        tensor.dtype == theirs[n].dtype and torch.equal(tensor, theirs[n]) for n, tensor in ours.items()
    )


def plain_trunk(path: Path, name: str) -> PreTrainedModel:
    """The trunk as transformers itself loads it."""
    model_class = getattr(transformers, TRUNKS[name][0])
    config = None
    if name == "mimo":
        config = model_class.config_class(**TRUNKS[name][1])
    return model_class.from_pretrained(path, config=config, dtype=torch.float32).eval()


@FAMILIES
def test_ours_comes_back(tmp_path: Path, name: str) -> None:
    model = attached(name)
    model.save_pretrained(tmp_path)
    assert depth_in(tmp_path, name) == 1
    again = load(tmp_path, KEEP)
    assert isinstance(again, MTPCarrier) and again.mtp_family is model.mtp_family
    assert same(model.state_dict(), again.state_dict())


@FAMILIES
def test_a_block_is_written_under_the_family_s_names(tmp_path: Path, name: str) -> None:
    """Those that handmade.py has from the family's own code, with the copies that the family is known to ship."""
    model = attached(name)
    model.save_pretrained(tmp_path / "ours")
    tiny_trunk(name).save_pretrained(tmp_path / "trunk")
    trunk = load_file(tmp_path / "trunk" / "model.safetensors")
    expected = set(trunk) | set(mtp_tensors(name, trunk))
    if name == "deepseek_v32":  # its files may omit the head's copy; a new one has it, for older readers
        expected.add("model.layers.2.shared_head.head.weight")
    assert set(load_file(tmp_path / "ours" / "model.safetensors")) == expected


@FAMILIES
def test_a_new_block_is_made_from_the_trunk_layer_of_its_kind(tmp_path: Path, name: str) -> None:
    trunk = tiny_trunk(name)
    with torch.no_grad():
        for parameter in trunk.parameters():  # so that no two norms are alike
            parameter.add_(torch.rand_like(parameter))
    attach(trunk, KEEP, init=None, family=MIMO if name == "mimo" else None).save_pretrained(tmp_path)
    tensors, copied = read(tmp_path), 0
    for stored, tensor in tensors.items():
        for pattern, target in DECODER[name]:
            if re.match(pattern, stored):
                assert torch.equal(tensors[re.sub(pattern, target, stored, count=1)], tensor), stored
                copied += 1
    assert copied == len(mtp_tensors(name, tensors)) - sum(part is not None for part in PARTS[name]) - len(
        COPIES.get(name, ())
    )


@FAMILIES
@pytest.mark.parametrize("shards", [1, 3])
def test_a_foreign_checkpoint_goes_through_unchanged(tmp_path: Path, name: str, shards: int) -> None:
    tensors = checkpoint(tmp_path / "theirs", name, shards=shards)
    load(tmp_path / "theirs", KEEP).save_pretrained(tmp_path / "ours", max_shard_size="5KB" if shards > 1 else "1GB")
    assert same(read(tmp_path / "ours"), tensors)
    assert depth_in(tmp_path / "ours", name) == 1
    if shards > 1:
        weight_map = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())["weight_map"]
        assert weight_map.keys() == tensors.keys()
        assert all(stored in load_file(tmp_path / "ours" / file) for stored, file in weight_map.items())
    before, after = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("theirs", "ours"))
    assert (before["model_type"], before["architectures"]) == (after["model_type"], after["architectures"])


@FAMILIES
def test_the_trunk_s_logits_are_transformers_own(tmp_path: Path, name: str) -> None:
    checkpoint(tmp_path, name)
    ids = token_rows(2, 9)
    with torch.no_grad():
        assert torch.equal(load(tmp_path, KEEP).eval()(ids).logits, plain_trunk(tmp_path, name)(ids).logits)


@FAMILIES
def test_without_mtp_no_trunk_tensor_is_lost(tmp_path: Path, name: str) -> None:
    """The MTP tensors share every shard with the trunk's."""
    tensors = checkpoint(tmp_path / "theirs", name, shards=3)
    model = load(tmp_path / "theirs", MTPConfig(enable=False))
    assert not isinstance(model, MTPCarrier)
    model.save_pretrained(tmp_path / "ours")
    trunk = {n: tensors[n] for n in tensors.keys() - mtp_tensors(name, tensors).keys()}
    assert same(read(tmp_path / "ours"), trunk)
    assert depth_in(tmp_path / "ours", name) == 0
    again = load(tmp_path / "ours")
    assert not isinstance(again, MTPCarrier)


@FAMILIES
def test_a_declared_block_that_is_gone_is_an_error_and_can_be_mended(tmp_path: Path, name: str) -> None:
    """What transformers' own save_pretrained leaves of a carrier."""
    tensors = checkpoint(tmp_path, name)
    write(tmp_path, {n: tensors[n] for n in tensors.keys() - mtp_tensors(name, tensors).keys()})
    with pytest.raises(UsageError, match=f"declares {DEPTH_KEY.get(name, 'num_nextn_predict_layers')}=1 but holds 0"):
        load(tmp_path)
    load(tmp_path, MTPConfig(enable=False)).save_pretrained(tmp_path / "mended")
    assert depth_in(tmp_path / "mended", name) == 0


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next", "ernie4_5", "longcat_flash", "nemotron_h", "mimo"])
def test_every_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    """All but those of all experts but one."""
    tensors = checkpoint(tmp_path, name)
    copies = {copy for copy, _ in COPIES.get(name, ())}
    for stored in sorted(mtp_tensors(name, tensors).keys() - copies):
        if re.search(r"experts\.[^1]\.", stored):
            continue
        write(tmp_path, {n: t for n, t in tensors.items() if n != stored})
        with pytest.raises(ForerunError, match=f"no tensor {stored}: restore it"):
            load(tmp_path, KEEP)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5", "ernie4_5", "longcat_flash"])
def test_a_tensor_that_a_save_would_lose_is_named(tmp_path: Path, name: str) -> None:
    tensors = checkpoint(tmp_path, name)
    stored = sorted(n for n in mtp_tensors(name, tensors) if n.endswith("_proj.weight"))[0] + "_scale_inv"
    write(tmp_path, tensors | {stored: torch.ones(1)})
    with pytest.raises(ForerunError, match=f"has no place for, first {stored}"):
        load(tmp_path, KEEP)
    load(tmp_path, MTPConfig(enable=False))


def test_quantised_tensors_are_not_taken_for_weights(tmp_path: Path) -> None:
    tensors = checkpoint(tmp_path, "deepseek_v3")
    stored = "model.layers.2.mlp.experts.1.up_proj.weight"
    write(tmp_path, tensors | {stored: tensors[stored].to(torch.float8_e4m3fn)})
    with pytest.raises(ForerunError, match=rf"{stored} is quantised \(torch.float8_e4m3fn\)"):
        load(tmp_path, KEEP)


@pytest.mark.parametrize(("name", "copy"), [(name, copy) for name in COPIES for copy, _ in COPIES[name]])
def test_a_copy_that_differs_from_the_trunk_is_named(tmp_path: Path, name: str, copy: str) -> None:
    tensors = checkpoint(tmp_path, name)
    tensors[copy][3, 5] += 1e-3
    write(tmp_path, tensors)
    with pytest.raises(ForerunError, match=f"{copy} differs from the trunk's"):
        load(tmp_path, KEEP)


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_optional_and_stay_as_they_were(tmp_path: Path, name: str) -> None:
    """Left out in the file, left out in a save; there in the file, they follow the trunk's."""
    copies = {copy: of for copy, of in COPIES[name]}
    tensors = checkpoint(tmp_path / "without", name, without=tuple(copies))
    load(tmp_path / "without", KEEP).save_pretrained(tmp_path / "ours")
    assert same(read(tmp_path / "ours"), tensors)
    checkpoint(tmp_path / "with", name)
    model = load(tmp_path / "with", KEEP)
    with torch.no_grad():
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            module.weight.add_(1.0)
    model.save_pretrained(tmp_path / "trained")
    trained = read(tmp_path / "trained")
    assert all(torch.equal(trained[copy], trained[of]) for copy, of in copies.items())


@EXPERTS
def test_stacked_experts_stay_stacked(tmp_path: Path, name: str) -> None:
    """Some files hold the MTP layer's experts stacked, as transformers' modules do."""
    model = attached(name)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    stacked = read(tmp_path / "stacked")
    assert any(n.endswith(("experts.up_proj", "experts.gate_up_proj")) for n in stacked if "layers.0" not in n)
    again = load(tmp_path / "stacked", KEEP)
    assert same(model.state_dict(), again.state_dict())
    again.save_pretrained(tmp_path / "again")
    assert same(read(tmp_path / "again"), {n: t for n, t in stacked.items()})


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_text", "ernie4_5", "attached"])
def test_two_layers(tmp_path: Path, name: str) -> None:
    model = attached(name, num_layers=2)
    model.save_pretrained(tmp_path / "ours")
    assert depth_in(tmp_path / "ours", name) == 2
    again = load(tmp_path / "ours", KEEP)
    assert isinstance(again, MTPCarrier) and again.mtp.num_depths == 2
    assert same(model.state_dict(), again.state_dict())
    if name.startswith("qwen"):  # one projection and one set of norms in the file
        assert again.mtp.layer(1).proj is again.mtp.layer(2).proj
        assert again.mtp.layer(1).decoder is not again.mtp.layer(2).decoder


@pytest.mark.parametrize("name", ["glm_moe_dsa", "longcat_flash", "nemotron_h"])
def test_families_of_one_layer_repeat_it(name: str) -> None:
    with pytest.raises(UsageError, match=r"hold 1 MTP layer.*repeat_layer=true"):
        attached(name, num_layers=2)
    model = attach(tiny_trunk(name), MTPConfig(enable=True, num_layers=2, repeat_layer=True))
    assert model.mtp.num_depths == 2 and len(model.mtp.layers) == 1


def test_the_key_is_cleared_wherever_it_stands(tmp_path: Path) -> None:
    """vLLM reads a multimodal configuration's own key before the one of its text."""
    checkpoint(tmp_path, "qwen3_5")
    config = json.loads((tmp_path / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    load(tmp_path, MTPConfig(enable=False)).save_pretrained(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config["mtp_num_hidden_layers"] == config["text_config"]["mtp_num_hidden_layers"] == 0


def test_the_key_may_be_absent(tmp_path: Path) -> None:
    """Qwen3-Next's own config.json has none; one layer is meant."""
    tensors = checkpoint(tmp_path, "qwen3_next")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["num_nextn_predict_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    load(tmp_path, KEEP).save_pretrained(tmp_path / "ours")
    assert same(read(tmp_path / "ours"), tensors) and depth_in(tmp_path / "ours", "qwen3_next") == 1
    load(tmp_path, MTPConfig(enable=False)).save_pretrained(tmp_path / "plain")
    assert depth_in(tmp_path / "plain", "qwen3_next") == 0


def test_routers_stay_in_float32() -> None:
    """transformers keeps them so in a bfloat16 trunk; the block's layer is of the same kind."""
    trunk = tiny_trunk("deepseek_v3", dtype=torch.bfloat16)
    trunk.model.layers[1].mlp.gate.float()
    block = attach(trunk, KEEP).mtp.layer(1)
    assert {block.proj.weight.dtype, block.decoder.mlp.experts.down_proj.dtype} == {torch.bfloat16}
    assert {block.decoder.mlp.gate.weight.dtype, block.decoder.mlp.gate.e_score_correction_bias.dtype} == {
        torch.float32
    }


@pytest.mark.parametrize("name", ["glm4_moe", "nemotron_h"])
def test_named_weights_hold_what_is_saved(name: str) -> None:
    """Also the routers' correction, a buffer: without it a synchronised model routes otherwise."""
    model, other = attached(name), attached(name, seed=1)
    names = dict(named_weights(model))
    assert any(n.endswith("e_score_correction_bias") for n in names if "layers.2" in n or n.startswith("mtp"))
    load_named_weights(other, names)
    assert same(model.state_dict(), other.state_dict())


@EXPERTS
def test_a_lenient_load_state_dict_takes_the_file_s_experts(tmp_path: Path, name: str) -> None:
    """A trainer resumes from its own file this way; what matched nothing would silently stay random."""
    model, other = attached(name), attached(name, seed=1)
    model.save_pretrained(tmp_path)
    result = other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert not [n for n in result.missing_keys if n.startswith("mtp.")]
    assert not [n for n in result.unexpected_keys if model.mtp_family.owns(n, 1, 2) and "layers.1" not in n]
    ours, theirs = ({n: t for n, t in m.state_dict().items() if n.startswith("mtp.")} for m in (model, other))
    assert same(ours, theirs)
