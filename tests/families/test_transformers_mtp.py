"""transformers' own MTP decoding opens what we write, for the families that it supports.

It looks for the MTP tensors under the layer numbers of the published checkpoints, so the tiny trunks have as many
layers as those.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from forerun import MTPConfig, attach, load
from forerun.models.carrier import MTPCarrier
from forerun.models.trunk import decoder_inputs
from tests.families.tiny import TRUNKS, tiny_trunk
from tests.models.tiny import token_rows

LAYERS = {"deepseek_v3": 61, "glm4_moe": 46}


@pytest.fixture(scope="module", params=LAYERS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A directory that we wrote, and the trunk as transformers loads it."""
    name, path = request.param, tmp_path_factory.mktemp("exported")
    trunk = tiny_trunk(name, num_hidden_layers=LAYERS[name], first_k_dense_replace=LAYERS[name] - 1)
    attach(trunk, MTPConfig(enable=True), init="plain").save_pretrained(path)
    return path, getattr(transformers, TRUNKS[name][0]).from_pretrained(path, dtype=torch.float32).eval()


def test_greedy_text_with_mtp_equals_plain_greedy(exported: tuple[Path, PreTrainedModel]) -> None:
    _, model = exported
    prompt = token_rows(1, 5)
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = model.generate(prompt, **settings)
    assert torch.equal(model.generate(prompt, use_mtp=True, **settings), plain)


def test_its_block_computes_what_ours_does(exported: tuple[Path, PreTrainedModel]) -> None:
    """Positions apart, which it counts one higher, and which a rotary embedding sees only as differences."""
    path, main = exported
    ours = load(path, MTPConfig(enable=True)).eval()
    assert isinstance(ours, MTPCarrier)
    theirs = MtpModel.from_pretrained(main).eval()
    hidden, embeds = torch.randn(2, 1, 6, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    positions = torch.arange(6)[None]
    with torch.no_grad():
        for_head, for_next = ours.mtp.step(1, hidden, embeds, **decoder_inputs(ours, hidden, positions))
        expected = theirs.forward_layer(0, hidden, positions + 1, None, inputs_embeds=embeds)
    torch.testing.assert_close(for_head, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(for_head, for_next)  # both hand the next depth what the LM head takes
