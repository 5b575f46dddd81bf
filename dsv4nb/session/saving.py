"""A chat to disk and back: its tree, its options, and the caches that its next turn goes on from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dsv4nb.engine.protocol import Engine
from dsv4nb.session.anchors import Anchor
from dsv4nb.session.archive import Archive, ArchiveError, check_compatible, read_archive, write_archive
from dsv4nb.session.chat import Chat
from dsv4nb.session.prefixes import Prefixes
from dsv4nb.session.request import Limits, Options
from dsv4nb.session.saved_options import options_from_json, options_to_json
from dsv4nb.session.saved_turns import tree_from_json, turns_to_json
from dsv4nb.session.server import Server
from dsv4nb.session.tree import Tree

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
        "options": options_to_json(state.options),
        "turns": turns_to_json(state.nodes),
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
        options = options_from_json(manifest["options"])
        tree = tree_from_json(manifest["turns"], manifest["head"])
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
