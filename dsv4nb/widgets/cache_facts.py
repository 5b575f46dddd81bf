"""What there is to know of a model's caches at one moment, and how a page is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from dsv4nb.checkpoint.config import ModelConfig
from dsv4nb.engine.free_memory import free_host_bytes
from dsv4nb.engine.memory import Counted, DeviceBytes
from dsv4nb.session.anchors import Anchor
from dsv4nb.session.host_cache import HostEntry
from dsv4nb.session.live import Ledger
from dsv4nb.session.prefixes import AnchorEntry, CacheStats, Decided, Prefixes
from dsv4nb.session.reuse import starts_with

TOLD = 100  # decisions, anchors and prefixes that a page lists, each
_TAIL = 24  # ids that name a prefix: its last ones
_TEXT = 72  # characters of them
_ROUGHLY = 2**26  # free memory changes all the time


class Model(Protocol):
    """What the panel asks of a model; `dsv4nb.handle.Model` is one."""

    @property
    def name(self) -> str: ...
    @property
    def engine(self) -> Any: ...
    @property
    def cache(self) -> Prefixes: ...
    @property
    def is_closed(self) -> bool: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def inspect(self, source: Any, **options: Any) -> Any: ...
    def on_queue_change(self, callback: Callable[[], None]) -> Callable[[], None]: ...


@runtime_checkable
class Described(Protocol):
    """An engine that says what network it runs."""

    @property
    def config(self) -> ModelConfig: ...


class Chat(Protocol):
    """What the panel asks of a chat; `dsv4nb.session.chat.Chat` is one."""

    @property
    def ledger(self) -> Ledger: ...
    @property
    def is_busy(self) -> bool: ...
    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """Ids that are committed somewhere.

    Attributes:
        key: names exactly these ids among all that a panel has shown.
        label: whose they are.
        n_reused: how many were not computed by the last run; 0 where there was none.
        n_prompt: how many are its prompt; what follows was generated. 0 where nobody knows.
        anchors: positions that can be gone on from, ascending.
    """

    key: str
    label: str
    ids: tuple[int, ...]
    n_reused: int = 0
    n_prompt: int = 0
    anchors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The caches of a model.

    Attributes:
        window: positions that a row sees, 0 where nobody knows.
        strips: the chat's ledger first, then the anchors, the most recently used first.
        anchor_names, host_names: the text at the end of those that are listed, by id.
        free_bytes: memory of the machine that can be taken, roughly.
        layers: (attention, ratio, routed by) of each layer, none where nobody knows.
    """

    window: int
    strips: tuple[Strip, ...]
    log: tuple[Decided, ...]
    stats: CacheStats
    host: tuple[HostEntry, ...]
    devices: tuple[DeviceBytes, ...]
    anchor_names: dict[int, str]
    host_names: dict[int, str]
    free_bytes: int
    layers: tuple[tuple[str, int, str], ...]


def facts_of(model: Model, ledger: Ledger | None) -> Facts:
    """Look at the caches; any thread may, nothing is waited for.

    Args:
        ledger: of the chat, None where there is none.
    """
    cache, engine = model.cache, model.engine
    anchors, stats, host = cache.anchors, cache.stats(), tuple(cache.host)
    config = engine.config if isinstance(engine, Described) else None
    layers: tuple[tuple[str, int, str], ...] = ()
    if config is not None:
        numbers = range(config.num_hidden_layers)
        routed = ["token id" if config.is_hashed(i) else "score" for i in numbers]
        layers = tuple((config.kind(i), config.compress_ratios[i], routed[i]) for i in numbers)
    listed = anchors[-TOLD:]
    return Facts(
        window=0 if config is None else config.sliding_window,
        strips=_strips(anchors, listed, ledger),
        log=tuple(cache.log),
        stats=stats,
        host=host,
        devices=engine.cache_bytes() if isinstance(engine, Counted) else (),
        anchor_names={anchor.id: _name(model, anchor.ids) for anchor in listed},
        host_names={entry.id: _host_name(model, entry.id) for entry in host[:TOLD]},
        free_bytes=free_host_bytes() // _ROUGHLY * _ROUGHLY,
        layers=layers,
    )


def _strips(anchors: Sequence[Anchor], listed: Sequence[Anchor], ledger: Ledger | None) -> tuple[Strip, ...]:
    strips = []
    if ledger is not None:
        key = f"chat {len(ledger.ids)} {hash(ledger.ids)}"
        marks = (ledger.n_reused, ledger.n_prompt) if ledger.n_prompt else (len(ledger.ids), 0)
        strips.append(
            Strip(
                key=key,
                label="this chat",
                ids=ledger.ids,
                n_reused=marks[0],
                n_prompt=marks[1],
                anchors=_on(ledger.ids, anchors),
            )
        )
    for anchor in reversed(listed):
        strips.append(
            Strip(
                key=f"anchor {anchor.id}",
                label=f"anchor {anchor.id}",
                ids=anchor.ids,
                n_reused=len(anchor.ids),
                anchors=_on(anchor.ids, anchors),
            )
        )
    return tuple(strips)


def _on(ids: tuple[int, ...], anchors: Sequence[Anchor]) -> tuple[int, ...]:
    """Return where anchors stand along `ids`."""
    return tuple(sorted(len(anchor.ids) for anchor in anchors if starts_with(ids, anchor.ids)))


def _name(model: Model, ids: Sequence[int]) -> str:
    line = " ".join(model.decode(ids[-_TAIL:]).split())
    return line if len(line) < _TEXT else f"…{line[1 - _TEXT :]}"


def _host_name(model: Model, id: int) -> str:
    try:
        return _name(model, model.cache.host_ids(id))
    except ValueError:  # it has just been deleted
        return ""


def page_of(facts: Facts, decode: Callable[[Sequence[int]], str], shown: str) -> dict[str, Any]:
    """Return what a page shows beside what it pulls.

    Args:
        shown: key of the strip to tell of; the first when there is none of it.
    """
    strip = next((one for one in facts.strips if one.key == shown), facts.strips[0] if facts.strips else None)
    stats = facts.stats
    return {
        "strips": [[one.key, one.label, len(one.ids)] for one in facts.strips],
        "ledger": None if strip is None else _ledger(strip, facts.window),
        "log": [_decided(one, decode) for one in facts.log[:TOLD]],
        "more": max(0, len(facts.log) - TOLD),
        "starts": stats.rows()[0][1],
        "anchors": [
            _anchor(one, facts.anchor_names[one.id]) for one in reversed(stats.anchors) if one.id in facts.anchor_names
        ],
        "host": [_host(one, facts.host_names[one.id]) for one in facts.host if one.id in facts.host_names],
        "more_stored": len(stats.anchors) + len(facts.host) - len(facts.anchor_names) - len(facts.host_names),
        "free": facts.free_bytes,
        "budgets": [
            ["anchors", stats.anchor_bytes, stats.budget_bytes],
            ["host memory", stats.host.bytes, stats.host.budget_bytes],
        ],
        "devices": [
            {
                "name": one.device,
                "classes": [[name, part.used, part.reserved] for name, part in one.classes.items()],
                "used": one.used,
                "reserved": one.reserved,
            }
            for one in facts.devices
        ],
        "layers": [list(layer) for layer in facts.layers],
    }


def _ledger(strip: Strip, window: int) -> dict[str, Any]:
    return {
        "key": strip.key,
        "label": strip.label,
        "n": len(strip.ids),
        "reused": strip.n_reused,
        "prompt": strip.n_prompt,
        "window": window,
        "anchors": list(strip.anchors),
    }


def _decided(one: Decided, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    decision, away = one.decision, one.decision.diverges_at
    return {
        "number": one.number,
        "at": one.at.strftime("%H:%M:%S"),
        "kind": decision.kind,
        "prompt": one.n_prompt,
        "length": decision.length,
        "computed": decision.computed,
        "reason": decision.reason,
        "away": None
        if away is None
        else [away.position, decode([away.expected]), None if away.met is None else decode([away.met])],
    }


def _anchor(one: AnchorEntry, name: str) -> dict[str, Any]:
    return {
        "id": one.id,
        "tokens": one.tokens,
        "bytes": one.nbytes,
        "pinned": one.is_pinned,
        "logits": one.has_logits,
        "name": name,
    }


def _host(one: HostEntry, name: str) -> dict[str, Any]:
    nbytes = round(one.mib * 2**20)
    return {
        "id": one.id,
        "tokens": one.tokens,
        "bytes": nbytes,
        "pinned": one.is_pinned,
        "hits": one.hits,
        "name": name,
    }
