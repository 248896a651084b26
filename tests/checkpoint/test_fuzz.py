"""A thousand malformed directories: each is exit code 0, 1 or 2 with clear lines, and never any other exception."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun import cli
from forerun.checkpoint.reader import INDEX
from forerun.doctor import inspect
from tests.checkpoint.checkpoints import PROJ, make, shards, write

DIRECTORIES = 1000

Files = dict[str, bytes | Callable[[Path], object]]
"""File name -> its content, or what makes something else of that name."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A healthy checkpoint in two shards, each with trunk and MTP tensors."""
    path = make(tmp_path_factory.mktemp("whole") / "one")
    tensors = dict(sorted(shards(path)["model.safetensors"].items()))
    names = list(tensors)
    write(path, {f"model-0000{i + 1}-of-00002.safetensors": {n: tensors[n] for n in names[i::2]} for i in range(2)})
    return {file.name: file.read_bytes() for file in path.iterdir()}


# Values that JSON can hold and a checkpoint's files should not.
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(1, 64),
    st.sampled_from([0, 1, -1, 2, 64, 65, 10**30, 2**63]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["", "../x", "/etc/passwd", "llama", "mimo", "deepseek_v3", "qwen3_5", "step3p5", "a\0b", "x" * 999]
    ),
    st.sampled_from([[], {}, [[]], ["lm_head"], {"model_type": "qwen3_5"}, {"text_config": {}}, [{}]]),
    st.recursive(
        st.integers(), lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner)
    ),
)
CONFIG_KEYS = (
    *("model_type", "num_nextn_predict_layers", "mtp_num_hidden_layers", "text_config", "hidden_size", "vocab_size"),
    *("num_hidden_layers", "num_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "initializer_range"),
    *("quantization_config", "tie_word_embeddings", "architectures"),
)
HEADER_VALUES = st.one_of(
    ODD,
    st.sampled_from(["F32", "BF16", "F8_E4M3", "I32", "U8", "BOOL", "Q9"]),
    st.lists(st.integers(0, 99), max_size=3),
)
NAMES = st.text(max_size=12) | st.sampled_from(
    [
        *("", PROJ, "model.mtp_layers.1.input_proj.weight", "model.mtp_layers.99999.x", "mtp.fc.weight", "."),
        *("model.layers.2.eh_proj.weight", "model.language_model." + PROJ[6:], "model.layers.0.mlp.up_proj.qweight"),
        *("a.layers.7." + "b" * 300, "model.mtp_layers.0.mlp.experts.0.up_proj.weight", "\x1b[31m\n", "module.lm_head"),
    ]
)
JUNK = st.binary(max_size=40) | st.sampled_from(
    [
        *(b"", b"\0", b"{", b"[]", b"null", b"GGUF\x03", b"PK\x03\x04", b"\x80\x04N.", b"[" * 3000, b'{"a":' * 3000),
        *(b"\xff\xfe", struct.pack("<Q", 1 << 62), struct.pack("<Q", 2) + b"{}", b"version https://git-lfs"),
    ]
)


def content(files: Files, name: str) -> bytes:
    found = files[name]
    return found if isinstance(found, bytes) else b""


def mutate(draw: st.DataObject, files: Files) -> None:
    """One change."""
    name = draw.draw(st.sampled_from(sorted(files)))
    how = draw.draw(st.sampled_from(MUTATIONS[Path(name).suffix]))
    how(draw, files, name)


def flip_bytes(draw: st.DataObject, files: Files, name: str) -> None:
    data = bytearray(content(files, name))
    if data:
        for _ in range(draw.draw(st.integers(1, 4))):
            data[draw.draw(st.integers(0, min(len(data), 3000) - 1))] = draw.draw(st.integers(0, 255))
    files[name] = bytes(data)


def cut(draw: st.DataObject, files: Files, name: str) -> None:
    data = content(files, name)
    files[name] = data[: draw.draw(st.integers(0, len(data)))]


def splice(draw: st.DataObject, files: Files, name: str) -> None:
    data = content(files, name)
    at = draw.draw(st.integers(0, len(data)))
    files[name] = data[:at] + draw.draw(JUNK) + data[at + draw.draw(st.integers(0, 20)) :]


def replace(draw: st.DataObject, files: Files, name: str) -> None:
    files[name] = draw.draw(JUNK)


def remove(draw: st.DataObject, files: Files, name: str) -> None:
    del files[name]


def rename(draw: st.DataObject, files: Files, name: str) -> None:
    other = draw.draw(st.sampled_from([*sorted(files), "model.safetensors", "pytorch_model.bin", "model.gguf", INDEX]))
    files[other], files[name] = files[name], files.get(other, b"")


def no_file(draw: st.DataObject, files: Files, name: str) -> None:
    outside = str(Path(__file__))
    files[name] = draw.draw(
        st.sampled_from(
            [
                lambda path: path.mkdir(),
                lambda path: path.symlink_to(outside),
                lambda path: path.symlink_to(path.name),
                lambda path: path.symlink_to("nowhere"),
                lambda path: os.mkfifo(path),
                lambda path: path.symlink_to("/dev/zero"),
            ]
        )
    )


def edit_json(draw: st.DataObject, files: Files, name: str) -> None:
    try:
        value = json.loads(content(files, name))
    except (ValueError, RecursionError):
        return
    if not isinstance(value, dict):
        return
    if name == INDEX and isinstance(value.get("weight_map"), dict) and value["weight_map"]:
        if draw.draw(st.booleans()):
            key = draw.draw(st.sampled_from(["weight_map", "metadata"]))
            value[key] = draw.draw(ODD)
        else:
            entries = value["weight_map"]
            key = draw.draw(st.sampled_from(sorted(entries)) | NAMES)
            entries[key] = draw.draw(st.sampled_from(sorted(map(str, entries.values()))) | ODD)
            if draw.draw(st.booleans()):
                del entries[key]
    else:
        value[draw.draw(st.sampled_from(CONFIG_KEYS))] = draw.draw(ODD)
    files[name] = json.dumps(value).encode()


def edit_header(draw: st.DataObject, files: Files, name: str) -> None:
    """A header that is well-formed and says something else: other names, types, shapes, places."""
    data = content(files, name)
    try:
        (size,) = struct.unpack_from("<Q", data)
        header: dict[str, Any] = json.loads(data[8 : 8 + size])
        tensors = sorted(key for key in header if key != "__metadata__")
    except (ValueError, struct.error, TypeError, RecursionError):
        return
    if not tensors:
        return
    for _ in range(draw.draw(st.integers(1, 3))):
        old = draw.draw(st.sampled_from(tensors))
        if old not in header:
            continue
        kind = draw.draw(st.sampled_from([0, 0, 0, 1, 2, 2, 3]))
        if kind == 0:
            header[draw.draw(NAMES)] = header.pop(old)
        elif kind == 1 and isinstance(header[old], dict):
            header[old][draw.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))] = draw.draw(HEADER_VALUES)
        elif kind == 2:
            shape = header[old].get("shape") if isinstance(header[old], dict) else None
            if isinstance(shape, list):
                header[old]["shape"] = draw.draw(st.permutations(shape))
        else:
            header[old] = draw.draw(ODD)
    text = json.dumps(header).encode()
    files[name] = struct.pack("<Q", len(text)) + text + data[8 + size :]


def fill_data(draw: st.DataObject, files: Files, name: str) -> None:
    """Zeros, NaN or noise where the tensors are."""
    data = content(files, name)
    start = 8 + struct.unpack_from("<Q", data)[0] if len(data) >= 8 else 0
    begin = draw.draw(st.integers(min(start, len(data)), len(data)))
    files[name] = data[:begin] + draw.draw(st.sampled_from([b"\0", b"\xff", b"\x3f"])) * (len(data) - begin)


ANY = (flip_bytes, cut, splice, replace, remove, rename, no_file)
MUTATIONS: dict[str, tuple[Callable[[st.DataObject, Files, str], None], ...]] = {
    ".json": (*ANY, *[edit_json] * 6),
    ".safetensors": (*ANY, *[edit_header] * 7, fill_data, fill_data),
    ".bin": ANY,
    ".gguf": ANY,
}


def lay_out(path: Path, files: Files) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for name, made in files.items():
        if isinstance(made, bytes):
            (path / name).write_bytes(made)
        else:
            made(path / name)


def run(path: Path, as_json: bool) -> tuple[int, str, list[str]]:
    """Exit code, stdout and the lines of stderr, as of `forerun inspect`."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.outcome(lambda: inspect(path, values=True, as_json=as_json))
    return code, out.getvalue(), err.getvalue().splitlines()


def test_a_thousand_malformed_directories(tmp_path: Path, whole: Files) -> None:
    outcomes: Counter[int] = Counter()
    kinds: Counter[str] = Counter()
    path = tmp_path / "checkpoint"

    @settings(
        max_examples=DIRECTORIES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def inspected(draw: st.DataObject) -> None:
        files = dict(whole)
        for _ in range(draw.draw(st.integers(1, 2))):
            if files:
                mutate(draw, files)
        lay_out(path, files)
        code, out, err = run(path, as_json=True)
        outcomes[code] += 1
        found = json.loads(out)
        assert code in (0, 1, 2) and found["readable"] == (code < 2)
        if code == 2:
            assert len(err) == 1 and err[0].startswith("forerun: error: ") and err[0].isprintable()
            assert len(err[0]) < 1000 and ": " in err[0].removeprefix("forerun: error: ")  # the mend
            return
        assert not err and found["healthy"] == (not found["problems"]) == (code == 0)
        kinds.update(problem["kind"] for problem in found["problems"])
        again, text, err = run(path, as_json=False)
        told = [line for line in text.splitlines() if line.startswith("problem (")]
        assert again == code and not err and len(told) == len(found["problems"])
        assert all("; mend: " in line and line.isprintable() and len(line) < 1500 for line in told)

    inspected()
    # Not all of them fail at the first door.
    assert sum(outcomes.values()) >= DIRECTORIES and min(outcomes[code] for code in (0, 1, 2)) >= 20, outcomes
    assert len(kinds) >= 12, kinds
