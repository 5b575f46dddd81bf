"""Which slice of which tensor lives on which rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4nb.checkpoint.config import ModelConfig, from_hf
from dsv4nb.checkpoint.inventory import ExpertFormat, Spec, expected_tensors
from dsv4nb.checkpoint.names import parse_name
from dsv4nb.checkpoint.synthetic import EXPERT_FORMATS, Format, hf_config
from dsv4nb.errors import RequestError
from dsv4nb.weights.packing import unpack_fp4, unpack_fp8, unpack_nvfp4
from dsv4nb.weights.placement import CLASSES, Kind, Part, Placement, class_of, place
from dsv4nb.weights.synthetic import SyntheticReader


def model(shape: str, changes: Mapping[str, Any], fmt: Format = "fp8fp4") -> tuple[ModelConfig, dict[str, Spec]]:
    config = from_hf(hf_config(shape, changes, fmt=fmt))
    drafter = {"flash": "nextn", "tiny": "none"}.get(shape, "dspark")
    return config, expected_tensors(config, drafter, EXPERT_FORMATS[fmt])  # type: ignore[arg-type]


FLASH, FLASH_ENTRIES = model("flash-0731", {})


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelConfig, dict[str, Spec], int]:
    """A model that divides into a number of ranks, and that number."""
    ranks = draw(st.integers(1, 5))
    fmt: Format = draw(st.sampled_from(list(EXPERT_FORMATS)))
    groups = ranks * draw(st.integers(1, 2))
    changes = {
        "o_groups": groups,
        "num_attention_heads": groups * draw(st.integers(1, 2)),
        "o_lora_rank": 128,
        "moe_intermediate_size": 128 * ranks * draw(st.integers(1, 2)),
        "vocab_size": ranks * draw(st.integers(100, 130)),
        "n_routed_experts": 2,
        "num_hidden_layers": draw(st.integers(ranks, 6)),
    }
    config, entries = model(draw(st.sampled_from(["tiny", "tiny-0731"])), changes, fmt)
    return config, entries, ranks


@given(models(), st.sampled_from(["tensor", "pipeline"]))
@settings(max_examples=40, deadline=None)
def test_every_element_of_every_tensor_is_somewhere_and_nothing_is_there_by_halves(
    drawn: tuple[ModelConfig, dict[str, Spec], int], kind: Kind
) -> None:
    config, entries, ranks = drawn
    placement = place(config, entries, ranks=ranks, kind=kind)
    assert placement.ranks == ranks
    has_drafter = any(name.startswith("mtp.") for name in entries)
    for name, spec in entries.items():
        held = [part for part in placement.parts(name) if part is not None]
        whole = Part(axis=0, first=0, last=spec.shape[0] if spec.shape else 1, shape=spec.shape)
        for part in held:
            assert torch.empty(spec.shape, device="meta")[part.index].shape == part.shape
        if any(part != whole for part in held):
            if name == "head.weight" and has_drafter:  # the first rank's share is in the whole that drafts
                assert held[0] == whole
                held[0] = replace(held[1], first=0, last=held[1].first)
            (axis,) = {part.axis for part in held}
            assert kind == "tensor" and len(held) == ranks
            assert (held[0].first, held[-1].last) == (0, spec.shape[axis])
            assert all(a.last == b.first for a, b in pairwise(held))
            assert len({part.shape for part in held}) == 1
        elif kind == "tensor" and name.startswith("mtp."):
            assert placement.parts(name) == (whole, *([None] * (ranks - 1)))
        else:
            copies = ranks if kind == "tensor" else 1
            second = kind == "pipeline" and ranks > 1 and name == "embed.weight" and has_drafter
            assert len(held) == copies + second
    assert [sum(placement.nbytes(rank).values()) for rank in range(ranks)] == bytes_by_parts(placement, entries)


def bytes_by_parts(placement: Placement, entries: Mapping[str, Spec]) -> list[int]:
    """What the parts take, from their shapes."""
    totals = [0] * placement.ranks
    for name, spec in entries.items():
        for rank, part in enumerate(placement.parts(name)):
            if part is not None:
                totals[rank] += replace(spec, shape=part.shape).nbytes
    return totals


SPLIT = {
    "head.weight",
    "attn.attn_sink",
    *(f"attn.{w}.{leaf}" for w in ("wq_b", "wo_a", "wo_b") for leaf in ("weight", "scale")),
    *(
        f"ffn.{kind}.w{i}.{leaf}"
        for kind in ("experts", "shared_experts")
        for i in (1, 2, 3)
        for leaf in ("weight", "scale", "weight_scale")
    ),
}


@given(models())
@settings(max_examples=20, deadline=None)
def test_what_is_split_is_what_the_ranks_share_and_nothing_else(
    drawn: tuple[ModelConfig, dict[str, Spec], int],
) -> None:
    config, entries, ranks = drawn
    placement = place(config, entries, ranks=ranks, kind="tensor")
    for name, spec in entries.items():
        part = placement.parts(name)[-1]
        if part is None:
            assert ranks > 1 and name.startswith("mtp."), name
            continue
        is_split = part.shape != spec.shape
        assert is_split == (ranks > 1 and parse_name(name).part in SPLIT), name


@pytest.mark.parametrize("fmt", EXPERT_FORMATS)
def test_a_rank_can_decode_its_part_with_its_part_of_the_scales(fmt: Format) -> None:
    changes = {"moe_intermediate_size": 256, "n_routed_experts": 2, "num_hidden_layers": 3}
    config, entries = model("tiny-0731", changes, fmt)
    placement = place(config, entries, ranks=2, kind="tensor")
    expert_format: ExpertFormat = EXPERT_FORMATS[fmt]
    reader = SyntheticReader(config, expert_format=expert_format)

    def decoded(module: str, rank: int | None) -> torch.Tensor:
        def read(leaf: str) -> torch.Tensor:
            tensor, part = reader.read(f"{module}.{leaf}"), placement.parts(f"{module}.{leaf}")[rank or 0]
            assert part is not None
            return tensor if rank is None else tensor[part.index]

        if f"{module}.weight_scale" in reader:
            return unpack_nvfp4(*(read(leaf) for leaf in ("weight", "weight_scale", "weight_scale_2")))
        if f"{module}.scale" not in reader:
            return read("weight").float()
        unpack = unpack_fp4 if reader.dtype(f"{module}.weight") == "I8" else unpack_fp8
        return unpack(read("weight"), read("scale"))

    trunk = [name for name in entries if not name.startswith("mtp.")]
    modules = {
        name.removesuffix(".weight") for name in trunk if parse_name(name).part in SPLIT and ".attn_" not in name
    }
    split = {module for module in modules - {"head"} if f"{module}.weight" in entries}
    assert len(split) == 3 * 12
    for module in split:
        axis = 1 if module.endswith((".wo_b", ".w2")) else 0
        whole, halves = decoded(module, None), [decoded(module, rank) for rank in (0, 1)]
        assert torch.equal(torch.cat(halves, axis), whole), module
        assert halves[0].shape[axis] == whole.shape[axis] // 2


# V4-Flash-0731 on two ranks, from the shapes: whole matrices, and halves of those that are split
SMALL = (1024 * 4096 + 8 * 32) + (512 * 4096 + 4 * 32) + 2 * (1024 + 512)
LARGE = (32768 * 1024 + 256 * 8) + (8192 * 4096 + 64 * 32) + (4096 * 8192 + 32 * 64) + 4 * 64
EXPERTS = 256 * 3 * (2048 * 2048 + 2048 * 128)
SHARED = 3 * (2048 * 4096 + 16 * 32)
GATE = 2 * 256 * 4096
STREAMS = 2 * 4 * (24 * 16384 + 24 + 3) + 2 * 2 * 4096
HEAD_STREAMS = 4 * (4 * 16384 + 4 + 1) + 2 * 4096
BY_HAND = {
    "embed": 2 * 129280 * 4096,
    "head": 2 * 64640 * 4096,
    "streams": 43 * STREAMS + HEAD_STREAMS,
    "attention": 43 * (SMALL + LARGE // 2),
    "compressor": 21 * (2 * 2 * 1024 * 4096 + 4 * 4 * 1024 + 2 * 512)
    + 20 * (2 * 2 * 512 * 4096 + 4 * 128 * 512 + 2 * 512),
    "indexer": 21
    * ((8192 * 1024 + 64 * 8) + 2 * 64 * 4096 + (2 * 2 * 256 * 4096 + 4 * 4 * 256 + 2 * 128)),
    "router": 43 * GATE + 40 * 4 * 256 + 3 * 8 * 129280 * 6,
    "experts": 43 * EXPERTS // 2,
    "shared": 43 * SHARED // 2,
    "drafter": 0,
}  # fmt: skip
DRAFTER = (
    3 * (STREAMS + SMALL + LARGE + GATE + 4 * 256 + EXPERTS + SHARED)
    + (4096 * 12288 + 32 * 96) + 2 * 4096 + HEAD_STREAMS
    + 2 * 2 * 129280 * 256 + 2 * (4096 + 256)
)  # fmt: skip


def test_v4_flash_on_two_ranks_takes_the_bytes_counted_by_hand() -> None:
    placement = place(FLASH, FLASH_ENTRIES, ranks=2, kind="tensor")
    drafts = BY_HAND | {"head": 2 * 129280 * 4096, "drafter": DRAFTER}
    assert (placement.nbytes(0), placement.nbytes(1)) == (drafts, BY_HAND)
    assert tuple(sum(placement.nbytes(rank).values()) for rank in (0, 1)) == (90_588_170_360, 79_195_801_180)
    assert tuple(BY_HAND) == CLASSES
    assert placement.layers == (range(43), range(43))
    trunk = {name: spec for name, spec in FLASH_ENTRIES.items() if not name.startswith("mtp.")}
    plain = place(FLASH, trunk, ranks=2, kind="tensor")
    assert plain.nbytes(0) == plain.nbytes(1) == BY_HAND


def test_v4_flash_on_one_rank_is_the_whole_checkpoint() -> None:
    placement = place(FLASH, FLASH_ENTRIES, ranks=1, kind="single")
    assert sum(placement.nbytes(0).values()) == 166_878_536_440
    assert placement.layers == (range(43),)
    trunk = {name: spec for name, spec in FLASH_ENTRIES.items() if not name.startswith("mtp.")}
    assert place(FLASH, trunk, ranks=1, kind="single").nbytes(0)["drafter"] == 0


def test_v4_flash_as_a_pipeline_of_two_is_cut_in_the_middle_of_its_bytes() -> None:
    placement = place(FLASH, FLASH_ENTRIES, ranks=2, kind="pipeline")
    assert placement.layers == (range(23), range(23, 43))
    first, last = placement.nbytes(0), placement.nbytes(1)
    embed = 2 * 129280 * 4096
    assert sum(first.values()) + sum(last.values()) == 166_878_536_440 + embed
    assert (first["embed"], first["head"], first["drafter"]) == (embed, 0, 0)
    assert (last["embed"], last["head"], last["drafter"]) == (embed, embed, 10_862_838_300)
    assert placement.parts("norm.weight") == (None, Part(axis=0, first=0, last=4096, shape=(4096,)))
    trunk = {name: spec for name, spec in FLASH_ENTRIES.items() if not name.startswith("mtp.")}
    alone = place(FLASH, trunk, ranks=2, kind="pipeline")
    assert alone.parts("embed.weight")[1] is None and len(alone.layers[0]) == 22


@given(st.integers(2, 4), st.integers(4, 8), st.booleans(), st.data())
@settings(max_examples=40, deadline=None)
def test_no_other_cut_of_a_pipeline_has_a_smaller_largest_rank(
    ranks: int, layers: int, has_drafter: bool, data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 1000), min_size=layers, max_size=layers))
    embed, head = data.draw(st.integers(1, 3000)), data.draw(st.integers(1, 3000))
    entries = {f"layers.{i}.attn.attn_sink": Spec("I8", (size,)) for i, size in enumerate(sizes)}
    entries |= {"embed.weight": Spec("I8", (embed,)), "head.weight": Spec("I8", (head,))}
    if has_drafter:
        entries["mtp.0.attn.attn_sink"] = Spec("I8", (500,))
    placement = place(replace(FLASH, num_hidden_layers=layers), entries, ranks=ranks, kind="pipeline")
    assert [i for span in placement.layers for i in span] == list(range(layers))

    def largest(cuts: tuple[int, ...]) -> int:
        loads = [sum(sizes[a:b]) for a, b in pairwise((0, *cuts, layers))]
        loads[0] += embed
        loads[-1] += head + (500 + embed if has_drafter else 0)
        return max(loads)

    found = max(sum(placement.nbytes(rank).values()) for rank in range(ranks))
    assert found == min(largest(cuts) for cuts in combinations(range(1, layers), ranks - 1))


@pytest.mark.parametrize(
    ("changes", "ranks", "field", "message"),
    [
        ({}, 3, "o_groups", "o_groups is 8: 8 groups of heads do not divide into 3 ranks"),
        ({}, 16, "o_groups", "takes 1, 2, 4 or 8 ranks; a pipeline takes up to 43"),
        (
            {"moe_intermediate_size": 384},
            2,
            "moe_intermediate_size",
            "moe_intermediate_size is 384: 384 columns in FP8 tiles of 128 do not divide into 2 ranks",
        ),
        ({"moe_intermediate_size": 768}, 4, "moe_intermediate_size", "takes 1 or 2 ranks"),
        ({"moe_intermediate_size": 128}, 8, "moe_intermediate_size", "takes 1, 2 or 4 ranks"),
        ({"vocab_size": 129281}, 2, "vocab_size", "129281 tokens do not divide into 2 ranks"),
        (
            {"o_groups": 6, "num_attention_heads": 6, "o_lora_rank": 64},
            2,
            "o_lora_rank",
            "o_lora_rank is 64: 384 rows in FP8 tiles of 128 do not divide into 2 ranks",
        ),
        (
            {"num_attention_heads": 8, "head_dim": 192},
            8,
            "num_attention_heads",
            "num_attention_heads is 8: 1536 rows in FP8 tiles of 128 do not divide into 8 ranks",
        ),
    ],
)
def test_a_model_that_does_not_divide_is_refused_with_the_numbers_and_the_way_out(
    changes: dict[str, int], ranks: int, field: str, message: str
) -> None:
    config, entries = model("flash-0731", {"num_hidden_layers": 43, "n_routed_experts": 6} | changes)
    with pytest.raises(RequestError) as refused:
        place(config, entries, ranks=ranks, kind="tensor")
    assert message in str(refused.value) and refused.value.param == field
    assert len(place(config, entries, ranks=ranks, kind="pipeline").layers) == ranks


@pytest.mark.parametrize(("inner", "ranks"), [(128, 2), (128, 4), (256, 4)])
def test_ranks_that_share_a_tile_have_its_scale_each(inner: int, ranks: int) -> None:
    sizes = {"moe_intermediate_size": inner, "o_groups": 4, "num_attention_heads": 4}
    changes = {**sizes, "n_routed_experts": 2, "num_hidden_layers": 3}
    config, entries = model("tiny-0731", changes)
    placement, reader = place(config, entries, ranks=ranks, kind="tensor"), SyntheticReader(config)
    for name in ("shared_experts.w1", "shared_experts.w2", "experts.1.w1", "experts.1.w2"):
        leaves = [f"layers.1.ffn.{name}.{leaf}" for leaf in ("weight", "scale")]
        unpack = unpack_fp4 if reader.dtype(leaves[0]) == "I8" else unpack_fp8
        parts = []
        for rank in range(ranks):
            held = [(leaf, placement.parts(leaf)[rank]) for leaf in leaves]
            parts.append(unpack(*(reader.read(leaf)[part.index] for leaf, part in held if part is not None)))
        assert torch.equal(torch.cat(parts, int(name.endswith("w2"))), unpack(*map(reader.read, leaves))), name


def test_a_plain_checkpoint_has_no_tiles_to_keep_whole() -> None:
    config, entries = model("tiny", {"moe_intermediate_size": 96, "n_routed_experts": 2}, "bf16")
    part = place(config, entries, ranks=2, kind="tensor").parts("layers.0.ffn.experts.1.w2.weight")[1]
    assert part == Part(axis=1, first=48, last=96, shape=(256, 48))


@pytest.mark.parametrize(
    ("kind", "ranks", "param", "message"),
    [
        ("single", 2, "ranks", "'single' has 1 rank, not 2"),
        ("tensor", 0, "ranks", "at least 1"),
        ("pipeline", 44, "num_hidden_layers", "Use at most 43 ranks"),
    ],
)
def test_a_number_of_ranks_that_cannot_be_is_refused(kind: Kind, ranks: int, param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        place(FLASH, FLASH_ENTRIES, ranks=ranks, kind=kind)
    assert refused.value.param == param


def test_every_tensor_has_a_class() -> None:
    assert {class_of(name) for name in FLASH_ENTRIES} == set(CLASSES)
    for name, expected in {
        "layers.4.attn.indexer.compressor.wkv.weight": "indexer",
        "layers.4.attn.compressor.wkv.weight": "compressor",
        "layers.4.attn.wkv.scale": "attention",
        "layers.4.attn_norm.weight": "streams",
        "layers.0.ffn.gate.tid2eid": "router",
        "mtp.2.markov_head.markov_w1.weight": "drafter",
        "hc_head_fn": "streams",
    }.items():
        assert class_of(name) == expected
    with pytest.raises(KeyError):
        place(FLASH, FLASH_ENTRIES, ranks=1, kind="single").parts("layers.43.attn.wkv.weight")
