"""What a fault is: one exact piece of text of one module, replaced by what people write by mistake."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

# The kinds of fault that users of several MTP frameworks have reported. Most of them crash nothing: acceptance just
# stays low, or a gradient is slightly wrong.
KINDS = {
    1: "mask rolled once too often or too seldom",
    2: "tokens skipped over: target rule or span rule",
    3: "prompt trained on as if no mask were given",
    4: "shift or attention crosses a document's boundary",
    5: "boundary filled with token 0 and trained on",
    6: "uneven micro-batches or ranks",
    7: "sequence mean taken for token mean, or the reverse",
    8: "isolated MTP loss reaches trunk, embedding or LM head",
    9: "detaching cuts depth 2 off block 1",
    10: "activation recompute changes or drops gradients",
    11: "loss scale and logged loss",
    12: "context-parallel shards",
    13: "halves of the projection's input in the wrong order",
    14: "depths chained to the wrong hidden",
    15: "tensors missing or left over at load",
    16: "a name that matches nothing leaves random weights",
    17: "draft with a cache differs from draft without",
    29: "rejected tokens leave recurrent or convolution state behind",
}


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        kind: a key of `KINDS`.
        name: unique, for reports.
        story: the fault in the words of someone who trains or serves MTP.
        module: dotted name of the module that is patched.
        old: text that stands in the module exactly once.
        new: what stands there instead.
        tests: node ids, each of which must fail under the fault (one parametrization at least) and pass without it.
    """

    kind: int
    name: str
    story: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def file(self) -> Path:
        path = ROOT.joinpath(*self.module.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def patched_source(self) -> str:
        """The module's source with the fault in it.

        Raises:
            ValueError: `old` does not stand there exactly once, or the result is no Python.
        """
        source = self.file.read_text(encoding="utf-8")
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"the text to replace stands in {self.module} {count} times, not once")
        patched = source.replace(self.old, self.new)
        try:
            compile(patched, str(self.file), "exec")
        except SyntaxError as error:
            raise ValueError(f"the patched {self.module} is no Python: {error}") from None
        return patched
