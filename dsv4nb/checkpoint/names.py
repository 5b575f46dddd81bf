"""Official tensor name ↔ (stack, layer, part, expert) (model.md 2.2).

Names are compared by whole components: `markov_w1` is no `w1`, and a shared expert is no routed one (T29).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stack = Literal["top", "layers", "mtp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorName:
    """Where a tensor belongs.

    Attributes:
        stack: "layers" is the trunk, "mtp" the drafter, "top" what belongs to no block.
        layer: index inside the stack, None at the top.
        part: the components inside the block without the expert's number, e.g. "ffn.experts.w1.weight".
        expert: number of the routed expert, None for everything else.
    """

    stack: Stack
    layer: int | None
    part: str
    expert: int | None = None

    @property
    def leaf(self) -> str:
        """Last component: "weight", "scale", "attn_sink", …"""
        return self.part.rpartition(".")[2]

    @property
    def module(self) -> str:
        """The part without its last component, "" when it has only one."""
        return self.part.rpartition(".")[0]

    def __str__(self) -> str:
        part = self.part
        if self.expert is not None:
            part = f"{_EXPERTS}{self.expert}.{part.removeprefix(_EXPERTS)}"
        return part if self.layer is None else f"{self.stack}.{self.layer}.{part}"


_EXPERTS = "ffn.experts."


def parse_name(name: str) -> TensorName:
    """Split an official name; `str()` of the result is `name` again.

    Raises:
        ValueError: not of the official form, e.g. a block without a number.
    """
    words = name.split(".")
    if not all(words):
        raise ValueError(f"tensor name {name!r} has an empty component")
    stack: Stack = "top"
    layer = None
    if words[0] in ("layers", "mtp"):
        stack = "layers" if words[0] == "layers" else "mtp"
        layer = _number(words[1] if len(words) > 2 else "", name)
        words = words[2:]
    expert = None
    if layer is not None and words[:2] == ["ffn", "experts"]:
        expert = _number(words[2] if len(words) > 3 else "", name)
        del words[2]
    return TensorName(stack=stack, layer=layer, part=".".join(words), expert=expert)


def _number(word: str, name: str) -> int:
    if not (word.isascii() and word.isdigit() and (word == "0" or word[0] != "0")):
        raise ValueError(f"tensor name {name!r} has {word!r} where a number belongs")
    return int(word)
