"""A chat to disk and back: its tree, its options, and the caches that its next turn goes on from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dsv4nb.engine.protocol import Engine
from dsv4nb.events import ToolCall, ToolResult
from dsv4nb.rounds import Rounds
from dsv4nb.session.anchors import Anchor
from dsv4nb.session.archive import Archive, ArchiveError, check_compatible, read_archive, write_archive
from dsv4nb.session.chat import Chat
from dsv4nb.session.prefixes import Prefixes
from dsv4nb.session.request import Limits, Options, toolset
from dsv4nb.session.server import Server
from dsv4nb.session.tree import Node, Tree, Turn

KIND = "chat"
_LOGITS = "logits"
_CACHE = "cache/"

Arrays = dict[str, npt.NDArray[Any]]


def save_chat(chat: Chat, path: str | os.PathLike[str], server: Server, limits: Limits) -> int:
    """Write a chat to one file, whole or not at all; return its bytes.

    Raises:
        ArchiveError: it cannot be written, or its caches copied; a file that was there is as it was.
    """
    state = chat.state()

    def dump(engine: Engine, prefixes: Prefixes) -> tuple[str, Arrays]:
        anchor = prefixes.of(state.ledger)
        arrays: Arrays = {}
        if anchor is not None:
            try:
                arrays = {f"{_CACHE}{name}": array for name, array in engine.dump(anchor.snapshot).items()}
            except MemoryError as error:
                raise ArchiveError(
                    "memory",
                    f"there is no memory to copy the caches of {anchor.snapshot.pos} tokens; close other chats",
                ) from error
            if anchor.logits is not None:
                arrays[_LOGITS] = anchor.logits
        return engine.layout(), arrays

    layout, arrays = server.do(dump)
    manifest = {
        "kind": KIND,
        "model": limits.model,
        "weights": limits.weights,
        "arithmetic": limits.arithmetic,
        "encoding": limits.revision,
        "layout": layout,
        "ledger": list(state.ledger) if arrays else [],
        "thinking": chat.thinking,
        "options": _options_to_json(state.options),
        "turns": [_node_to_json(node) for node in state.nodes],
        "head": state.head.number if state.head else 0,
    }
    return write_archive(path, Archive(manifest=manifest, arrays=arrays))


def read_chat(
    path: str | os.PathLike[str], server: Server, limits: Limits
) -> tuple[Options, bool, Tree, tuple[int, ...]]:
    """Read what `save_chat` wrote, and make its caches known to the engine.

    Returns:
        Options, whether it thinks, the tree, and the ids that its caches stand for.

    Raises:
        ArchiveError: the file cannot be read, or is of another model; nothing was changed.
    """
    archive = read_archive(path)
    manifest = archive.manifest
    if manifest["kind"] != KIND:
        raise ArchiveError("foreign", f"{path} holds a {manifest['kind']}, not a chat")
    try:
        options = _options_from_json(manifest["options"])
        tree = _tree_from_json(manifest["turns"], manifest["head"])
        ledger, thinking = tuple(manifest["ledger"]), bool(manifest["thinking"])
    except (KeyError, TypeError, ValueError) as error:
        raise ArchiveError("damaged", f"{path} holds no chat that can be read: {error!r}") from error

    def adopt(engine: Engine, prefixes: Prefixes) -> None:
        check_compatible(
            manifest,
            weights=limits.weights,
            arithmetic=limits.arithmetic,
            encoding=limits.revision,
            layout=engine.layout(),
        )
        if ledger and prefixes.of(ledger) is None:
            cache = {k.removeprefix(_CACHE): a for k, a in archive.arrays.items() if k.startswith(_CACHE)}
            try:
                snapshot = engine.load(cache, len(ledger))
            except MemoryError as error:
                raise ArchiveError(
                    "memory", f"the caches of {path}, {len(ledger)} tokens, have no room in memory; close other chats"
                ) from error
            prefixes.adopt(Anchor(ids=ledger, snapshot=snapshot, logits=_row(archive.arrays, engine.vocab_size)))

    server.do(adopt)
    return options, thinking, tree, ledger


def _row(arrays: Mapping[str, npt.NDArray[Any]], vocab_size: int) -> npt.NDArray[np.float32] | None:
    row = arrays.get(_LOGITS)
    if row is not None and (row.shape != (vocab_size,) or row.dtype != np.float32):
        raise ArchiveError("damaged", f"the logits are {row.dtype} {list(row.shape)}; expected float32 [{vocab_size}]")
    return row


def _options_to_json(options: Options) -> dict[str, Any]:
    """Return what differs from the defaults; functions become declarations."""
    defaults = Options()
    out = {f.name: getattr(options, f.name) for f in fields(Options)}
    out = {name: value for name, value in out.items() if value != getattr(defaults, name)}
    if "tools" in out:
        out["tools"] = toolset(options).schemas
    if "logit_bias" in out:  # JSON has neither whole numbers as keys nor an infinity
        out["logit_bias"] = [[int(token), repr(float(bias))] for token, bias in dict(out["logit_bias"]).items()]
    return out


def _options_from_json(raw: Mapping[str, Any]) -> Options:
    known = {f.name for f in fields(Options)}
    if unknown := set(raw) - known:
        raise ValueError(f"unknown options {', '.join(sorted(unknown))}")
    bias = {int(token): float(value) for token, value in raw.get("logit_bias", ())}
    return Options(**{**raw, **({"logit_bias": bias} if bias else {})})


def _node_to_json(node: Node) -> dict[str, Any]:
    return {
        "parent": node.parent.number if node.parent else 0,
        "turn": asdict(replace(node.turn, rounds=Rounds())) | {"rounds": node.turn.rounds.to_dicts()},
        "messages": list(map(dict, node.messages)),
    }


def _tree_from_json(turns: Sequence[Mapping[str, Any]], head: int) -> Tree:
    """Return the tree; a turn follows one that was written down before it."""
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


def _turn_from_json(raw: Mapping[str, Any]) -> Turn:
    turn = Turn(**raw)
    return replace(
        turn,
        calls=tuple(ToolCall(**call) for call in raw["calls"]),
        results=tuple(ToolResult(**result) for result in raw["results"]),
        rounds=Rounds.from_dicts(raw.get("rounds", ())),
        marks=tuple((int(reasoning), int(text)) for reasoning, text in raw.get("marks", ())),
    )
