"""Tensors as /update_weights_from_tensor takes them: a pickle of [(name, tensor), ...] in base64.

SGLang's protocol is a pickle, which its server reads with an unpickler that knows a list of harmless names and no
others. Only the writing side is here, and it is no pickler: it can write strings, numbers, bytes, tuples and the three
names that a tensor with its data inline needs. Nothing is ever unpickled on our side.

The names and their arguments were read in SGLang 0.5.23, `utils/common.py` (MultiprocessingSerializer, SafeUnpickler).
Opcodes are those of pickle protocol 4 (PEP 3154).
"""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.models.weight_stream import Named

_PROTOCOL_4 = b"\x80\x04"
_MARK, _LIST, _TUPLE, _APPENDS, _CALL, _FALSE, _STOP = b"(", b"]", b"t", b"e", b"R", b"\x89", b"."


def encode(named_tensors: Sequence[Named]) -> str:
    """One bucket. The tensors are brought to the CPU; their data is part of the text."""
    parts = [_PROTOCOL_4, _LIST, _MARK]
    for name, tensor in named_tensors:
        parts += [_MARK, _text(name), *_tensor(tensor), _TUPLE]
    parts += [_APPENDS, _STOP]
    return base64.b64encode(b"".join(parts)).decode()


def _tensor(tensor: Tensor) -> list[bytes]:
    data = tensor.detach().to("cpu").contiguous()
    if data.untyped_storage().nbytes() != data.nbytes:  # a view's storage would be sent as a whole
        data = data.clone()
    storage = torch.storage.TypedStorage(wrap_storage=data.untyped_storage(), dtype=data.dtype, _internal=True)
    file = io.BytesIO()
    torch.save(storage, file, _use_new_zipfile_serialization=False)
    return [
        _name("torch._utils", "_rebuild_tensor_v2"),
        _MARK,
        *(_name("torch.storage", "_load_from_bytes"), _MARK, _bytes(file.getvalue()), _TUPLE, _CALL),
        _int(0),
        _ints(data.shape),
        _ints(data.stride()),
        _FALSE,  # requires no gradient
        *(_name("collections", "OrderedDict"), _MARK, _TUPLE, _CALL),  # and has no backward hooks
        _TUPLE,
        _CALL,
    ]


def _name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _bytes(data: bytes) -> bytes:
    return b"\x8e" + struct.pack("<Q", len(data)) + data


def _int(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def _ints(values: Sequence[int]) -> bytes:
    return _MARK + b"".join(map(_int, values)) + _TUPLE
