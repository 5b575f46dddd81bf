from __future__ import annotations

from typing import Any

import pytest

from dsv4nb.checkpoint.config import from_hf
from dsv4nb.checkpoint.inventory import expected_tensors
from dsv4nb.checkpoint.names import TensorName, parse_name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("embed.weight", TensorName(stack="top", layer=None, part="embed.weight")),
        ("hc_head_fn", TensorName(stack="top", layer=None, part="hc_head_fn")),
        ("layers.0.attn.attn_sink", TensorName(stack="layers", layer=0, part="attn.attn_sink")),
        ("layers.42.attn.wq_a.scale", TensorName(stack="layers", layer=42, part="attn.wq_a.scale")),
        (
            "layers.3.ffn.experts.17.w1.weight",
            TensorName(stack="layers", layer=3, part="ffn.experts.w1.weight", expert=17),
        ),
        (
            "layers.3.ffn.shared_experts.w1.weight",
            TensorName(stack="layers", layer=3, part="ffn.shared_experts.w1.weight"),
        ),
        ("mtp.2.markov_head.markov_w1.weight", TensorName(stack="mtp", layer=2, part="markov_head.markov_w1.weight")),
        ("mtp.0.ffn.experts.0.w2.scale", TensorName(stack="mtp", layer=0, part="ffn.experts.w2.scale", expert=0)),
    ],
)
def test_splits_and_joins(text: str, name: TensorName) -> None:
    assert parse_name(text) == name
    assert str(name) == text


def test_leaf_and_module_are_whole_components() -> None:
    name = parse_name("layers.1.hc_attn_scale")
    assert (name.leaf, name.module) == ("hc_attn_scale", "")
    name = parse_name("mtp.2.markov_head.markov_w1.weight")
    assert (name.leaf, name.module, name.expert) == ("weight", "markov_head.markov_w1", None)


@pytest.mark.parametrize(
    "text",
    [
        "layers.attn.wq_a.weight",
        "layers.01.attn.wq_a.weight",
        "layers.-1.attn.wq_a.weight",
        "layers.١.attn.wq_a.weight",
        "layers.3",
        "layers.3.ffn.experts.w1.weight",
        "layers.3.ffn.experts.4",
        "layers..attn.wq_a.weight",
        "",
    ],
)
def test_refuses_other_forms(text: str) -> None:
    with pytest.raises(ValueError, match="tensor name"):
        parse_name(text)


def test_every_name_of_a_release_survives(releases: dict[str, dict[str, Any]]) -> None:
    names = expected_tensors(from_hf(releases["0731"]), "dspark", "fp4")
    assert all(str(parse_name(n)) == n for n in names)
    assert len({parse_name(n) for n in names}) == len(names)
