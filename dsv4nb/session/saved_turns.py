"""The turns of a chat to JSON and back; what an older file does not tell has its default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from dsv4nb.config import SamplerConfig, SpecConfig
from dsv4nb.events import Done, Reuse, Timings, TokenLogprob, ToolCall, ToolResult
from dsv4nb.rounds import Rounds, SpecUsage
from dsv4nb.session.saved_options import bias_from_json, bias_to_json, options_from_json, options_to_json
from dsv4nb.session.tree import Node, Tree, Turn


def turns_to_json(nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """Return each turn with the number of the one that it follows, 0 for none."""
    return [
        {
            "parent": node.parent.number if node.parent else 0,
            "turn": _turn_to_json(node.turn),
            "messages": list(map(dict, node.messages)),
        }
        for node in nodes
    ]


def tree_from_json(turns: Sequence[Mapping[str, Any]], head: int) -> Tree:
    """Return the tree; a turn follows one that was written down before it.

    Args:
        head: number of the turn that the chat stands at, 0 before the first.

    Raises:
        ValueError, TypeError, KeyError: these are no turns.
    """
    nodes: list[Node] = []
    for number, raw in enumerate(turns, 1):
        parent = raw["parent"]
        if not 0 <= parent < number:
            raise ValueError(f"turn {number} follows turn {parent}")
        nodes.append(
            Node(
                number=number,
                parent=nodes[parent - 1] if parent else None,
                turn=_turn_from_json(raw["turn"]),
                messages=tuple(raw["messages"]),
            )
        )
    if not 0 <= head <= len(nodes):
        raise ValueError(f"the chat stands at turn {head} of {len(nodes)}")
    return Tree(nodes, nodes[head - 1] if head else None)


def _turn_to_json(turn: Turn) -> dict[str, Any]:
    plain = asdict(replace(turn, rounds=Rounds(), runs=(), options=None))
    return plain | {
        "rounds": turn.rounds.to_dicts(),
        "runs": [_run_to_json(run) for run in turn.runs],
        "options": None if turn.options is None else options_to_json(turn.options),
    }


def _turn_from_json(raw: Mapping[str, Any]) -> Turn:
    return replace(
        Turn(**raw),
        calls=tuple(ToolCall(**call) for call in raw["calls"]),
        results=tuple(ToolResult(**result) for result in raw["results"]),
        rounds=Rounds.from_dicts(raw.get("rounds", ())),
        marks=tuple((int(reasoning), int(text)) for reasoning, text in raw.get("marks", ())),
        runs=tuple(_run_from_json(run) for run in raw.get("runs", ())),
        ids=tuple(map(int, raw.get("ids", ()))),
        logprobs=tuple(_logprob_from_json(one) for one in raw.get("logprobs", ())),
        options=None if raw.get("options") is None else options_from_json(raw["options"]),
    )


def _logprob_from_json(raw: Mapping[str, Any]) -> TokenLogprob:
    return TokenLogprob(**{**raw, "top": tuple((int(token), float(logprob)) for token, logprob in raw["top"])})


def _run_to_json(run: Done) -> dict[str, Any]:
    plain = asdict(run)
    plain["config"]["logit_bias"] = bias_to_json(dict(run.config.logit_bias))
    return plain


def _run_from_json(raw: Mapping[str, Any]) -> Done:
    bias = tuple(bias_from_json(raw["config"]["logit_bias"]).items())
    timings = raw["timings"]
    return replace(
        Done(**raw),
        config=SamplerConfig(**raw["config"] | {"logit_bias": bias}),
        timings=Timings(**timings | {"marks": tuple((str(label), float(at)) for label, at in timings["marks"])}),
        spec=None if raw["spec"] is None else SpecUsage(**raw["spec"]),
        spec_config=None if raw["spec_config"] is None else SpecConfig(**raw["spec_config"]),
        reuse=None if raw["reuse"] is None else Reuse(**raw["reuse"]),
    )
