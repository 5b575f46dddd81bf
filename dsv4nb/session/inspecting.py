"""Looks inside the model while it runs a sequence of ids again, and changes what is in there where it is asked to.

The sequence is computed from its beginning into caches of its own, on the serving thread and in the queue's order, so
nothing that chats go on from is touched. How a prompt is cut changes no bit, so what is seen is what was computed when
the ids were generated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from difflib import get_close_matches
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dsv4nb.engine.protocol import Cancelled, Engine
from dsv4nb.engine.taps import LAYER_PLACES, Tap, Taps, Watchable, tap_names
from dsv4nb.errors import ModelClosed, Overloaded, PromptEmpty, RequestError
from dsv4nb.events import Generation
from dsv4nb.session.inspection import Inspection, Ints
from dsv4nb.session.prefixes import Prefixes
from dsv4nb.session.recording import Plan, Recorder
from dsv4nb.session.request import ChatTokens
from dsv4nb.session.server import Server

LIMIT_MIB = 256  # of all arrays of one inspection

Change = Callable[[Tensor], Tensor | None]


@runtime_checkable
class HasIds(Protocol):
    """A conversation; `dsv4nb.session.chat.Chat` is one."""

    def ids(self, turn: int = -1) -> tuple[int, ...]: ...


class Inspecting:
    """Inspections and taps of one handle.

    Args:
        is_closed: whether the handle is.
    """

    def __init__(
        self, engine: Engine, server: Server, tokens: ChatTokens, name: str, is_closed: Callable[[], bool]
    ) -> None:
        self._engine, self._server, self._tokens, self._name, self._is_closed = engine, server, tokens, name, is_closed
        self._armed: tuple[Tap, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The places that a tap can stand at, in the order in which a forward comes by; none where there are none."""
        return tap_names(self._engine.config.num_hidden_layers) if isinstance(self._engine, Watchable) else ()

    @property
    def armed(self) -> Taps | None:
        """The taps that runs started at this moment go through, None when there are none."""
        return Taps(self._armed) if self._armed else None

    def refuse_reuse(self, what: str) -> None:
        """Refuse a run that would leave what taps changed to later ones.

        Raises:
            RequestError: a tap is on.
        """
        if self._armed:
            raise RequestError(
                f"a tap is on at {self._armed[-1].place}, and {what} leave their caches to later runs; "
                "leave the with block first, or use generate()",
                param="tap",
            )

    def tap(self, place: str, change: Change | npt.ArrayLike, tokens: object) -> AbstractContextManager[None]:
        """Check a tap; see `Model.tap`."""
        self._watchable()
        self._check_place(place, "place")
        positions = None if tokens is None else _positions(tokens)
        see = _calling(change) if callable(change) else _putting(place, change, positions)
        at = None if positions is None else torch.from_numpy(positions)
        return self._on(Tap(place=place, see=see, positions=at))

    @contextmanager
    def _on(self, tap: Tap) -> Iterator[None]:
        self._armed = (*self._armed, tap)
        try:
            yield
        finally:
            self._armed = tuple(other for other in self._armed if other is not tap)

    def inspect(
        self,
        source: Generation | Sequence[int] | HasIds,
        *,
        turn: int | None,
        layers: object,
        tokens: object,
        per_head: bool,
        keep: str | Sequence[str],
        attention: bool,
        logits: bool,
        lens: bool,
    ) -> Inspection:
        """Run a sequence again and keep what happened; see `Model.inspect`."""
        engine = self._watchable()
        ids = self._ids(source, turn)
        n_layers = engine.config.num_hidden_layers
        places = (keep,) if isinstance(keep, str) else tuple(keep)
        for place in places:
            self._check_place(place, "keep")
        plan = Plan(
            ids=ids,
            tokens=_chosen(tokens, len(ids), "tokens"),
            layers=tuple(_chosen(layers, n_layers, "layers").tolist()),
            per_head=_flag("per_head", per_head),
            keep=tuple(dict.fromkeys(places)),
            attention=_flag("attention", attention),
            logits=_flag("logits", logits),
            lens=_flag("lens", lens),
            config=engine.config,
        )
        _require_room(plan)
        return self._carry_out(engine, plan)

    def _carry_out(self, engine: Watchable, plan: Plan) -> Inspection:
        armed, left = self._armed, threading.Event()

        def job(own: Engine, _prefixes: Prefixes) -> Inspection:
            recorder = Recorder(plan, engine)
            _run(own, engine, plan, recorder.taps(armed), lambda: left.is_set() or self._is_closed())
            pieces = tuple(map(self._tokens.token_bytes, plan.ids))
            return recorder.inspection(self._name, pieces, tuple(dict.fromkeys(tap.place for tap in armed)))

        try:
            return self._server.do(job)
        except Cancelled:
            raise ModelClosed(self._name) from None
        except MemoryError as error:
            raise Overloaded(f"memory ran out while {len(plan.ids)} tokens were inspected: {error}") from error
        finally:
            left.set()  # an interrupt leaves at once; the run stops before its next chunk

    def _watchable(self) -> Watchable:
        if self._is_closed():
            raise ModelClosed(self._name)
        if not isinstance(self._engine, Watchable):
            raise RequestError(f"the engine of {self._name!r} has no places to watch", param="engine")
        return self._engine

    def _ids(self, source: object, turn: int | None) -> tuple[int, ...]:
        is_chat = isinstance(source, HasIds) and not isinstance(source, Generation)
        if turn is not None and not is_chat:
            raise RequestError("turn= is for a chat; leave it out", param="turn")
        given: Any = source
        if isinstance(source, Generation):
            given = source.all_ids
        elif isinstance(source, HasIds):
            given = source.ids(-1 if turn is None else turn)
        if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
            raise RequestError(
                f"source is {type(source).__name__}; pass a Generation, a chat, or ids (m.tokenize makes them of text)",
                param="source",
            )
        ids = tuple(given)
        if not ids:
            raise PromptEmpty("source")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise RequestError(f"source has {token!r}; ids are integers", param="source")
            if not 0 <= token < self._engine.vocab_size:
                raise RequestError(f"source has {token}; ids are 0 to {self._engine.vocab_size - 1}", param="source")
        if len(ids) > self._engine.max_seq:
            raise RequestError(f"source has {len(ids)} ids; max_seq is {self._engine.max_seq}", param="source")
        return tuple(map(int, ids))

    def _check_place(self, place: object, param: str) -> None:
        if place not in self.names:
            near = get_close_matches(str(place), self.names, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}?" if near else f"A layer has {', '.join(LAYER_PLACES)}."
            raise RequestError(f"there is no place {place!r}. {hint} m.tap_names lists all.", param=param)


def _run(engine: Engine, watched: Watchable, plan: Plan, taps: Taps, should_stop: Callable[[], bool]) -> None:
    """Run the ids up to the last token that is watched, in caches of their own."""
    if should_stop():
        raise Cancelled
    state = engine.new_state()
    try:
        with watched.tapped(taps):
            engine.prefill(state, plan.ids[: int(plan.tokens[-1]) + 1], should_stop=should_stop)
    finally:
        engine.release(state)


def _require_room(plan: Plan) -> None:
    nbytes = plan.nbytes
    if nbytes > LIMIT_MIB * 2**20:
        most = max(1, int(len(plan.tokens) * LIMIT_MIB * 2**20 / nbytes))
        extra = [name for name in ("keep", "per_head", "lens") if getattr(plan, name)]
        without = f", or leave out {', '.join(extra)}" if extra else ""
        off = [f"{name}=False" for name in ("attention", "logits") if getattr(plan, name)]
        without += f", or pass {' or '.join(off)}" if off else ""
        raise RequestError(
            f"{len(plan.tokens):,} tokens in {len(plan.layers)} layers take {nbytes / 2**20:,.0f} MiB; at most "
            f"{LIMIT_MIB} MiB fit into one inspection. Watch about {most:,} tokens with tokens=, or "
            f"fewer layers{without}.",
            param="tokens",
        )


def _calling(change: Change) -> Callable[[Tensor, Tensor], Tensor | None]:
    return lambda values, _positions: change(values)


def _putting(place: str, values: npt.ArrayLike, positions: Ints | None) -> Callable[[Tensor, Tensor], Tensor | None]:
    """Put given rows in the place of what is there: row i at position i, or at the i-th of `positions`."""
    try:
        given = torch.from_numpy(np.array(values, np.float32))
    except (TypeError, ValueError):
        raise RequestError(
            f"change is {type(values).__name__}; it must be a function of a tensor, or the rows to put at {place}",
            param="change",
        ) from None
    n = len(given) if given.ndim else 0
    at = torch.arange(n) if positions is None else torch.from_numpy(positions)
    if n != len(at) or not n:
        raise RequestError(
            f"change has {n} rows for {len(at)} tokens; tokens= says where each of them stands", param="change"
        )

    def put(seen: Tensor, where: Tensor) -> Tensor:
        there = torch.isin(where, at)
        if given.shape[1:] != seen.shape[1:]:
            raise RequestError(
                f"the rows for {place} are {list(given.shape[1:])}; a row there is {list(seen.shape[1:])}",
                param="change",
            )
        seen[there] = given[torch.searchsorted(at, where[there])]
        return seen

    return put


def _chosen(wanted: object, count: int, name: str) -> Ints:
    """Return which of `count` are wanted, ascending; negative numbers count from the end."""
    if wanted is None:
        return np.arange(count)
    if isinstance(wanted, slice):
        numbers = list(range(*wanted.indices(count)))
    else:
        numbers = [_integer(i, name) for i in (wanted if isinstance(wanted, Iterable) else (wanted,))]
    for i in numbers:
        if not -count <= i < count:
            raise RequestError(f"{name} has {i}; there are {count}, 0 to {count - 1}", param=name)
    if not numbers:
        raise RequestError(f"{name} is {wanted!r}, which is none of {count}", param=name)
    return np.unique(np.array(numbers, np.int64) % count)


def _positions(tokens: object) -> Ints:
    """Return the positions of a tap, ascending and each once."""
    numbers = [_integer(i, "tokens") for i in (tokens if isinstance(tokens, Iterable) else (tokens,))]
    if not numbers or any(after <= before for before, after in zip([-1, *numbers], numbers, strict=False)):
        raise RequestError(
            f"tokens is {tokens!r}; positions count from 0 and are given in ascending order", param="tokens"
        )
    return np.array(numbers, np.int64)


def _integer(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise RequestError(f"{name} has {value!r}; it must be an integer", param=name)
    return int(value)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}; it must be True or False", param=name)
    return value
