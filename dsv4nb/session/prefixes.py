"""Everything of earlier runs that a new one can go on from: anchors on the device, prefixes in host memory.

Prefixes are found by their ids, whatever chat they come from, so a fork, an edit, another try and a batch of prompts
with one beginning need no bookkeeping of their own.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from dsv4nb.engine.protocol import DecodeState, Engine, Row
from dsv4nb.errors import RequestError
from dsv4nb.session.anchors import Anchor, Anchors
from dsv4nb.session.host_cache import HostCache, HostEntry, HostPrefix, HostStats, Miss
from dsv4nb.session.reuse import DEFAULT, Decision, Known, Policy, decide
from dsv4nb.tables import as_html, as_text

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

LOGGED = 200  # decisions that are remembered
BUDGET_BYTES = 512 * 2**20  # of the anchors' snapshots


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorEntry:
    """One anchor as a person sees it.

    Attributes:
        id: names it among all that there ever were.
        nbytes: its own, without what it shares.
        has_logits: whether a prompt that ends there needs no computing.
        is_pinned: whether it stays until it is deleted.
    """

    id: int
    tokens: int
    nbytes: int
    has_logits: bool
    is_pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """One decision about where a run starts.

    Attributes:
        number: of the decisions since the model was loaded, from 1.
        at: local time.
    """

    number: int
    at: datetime
    n_prompt: int
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """What is known of earlier runs.

    Attributes:
        reused, computed: prompt tokens since the model was loaded, by how they came about.
        decisions: how often each kind of start was chosen.
    """

    anchors: tuple[AnchorEntry, ...]
    anchor_bytes: int
    budget_bytes: int
    host: HostStats
    reused: int
    computed: int
    decisions: dict[str, int]

    def rows(self) -> list[tuple[str, str]]:
        """Return the numbers as (label, text)."""
        asked = self.reused + self.computed
        share = f", {self.reused / asked:.0%} of {asked:,} prompt tokens not computed again" if asked else ""
        tokens = ", ".join(str(anchor.tokens) for anchor in self.anchors) or "none"
        return [
            ("starts", (", ".join(f"{n} {kind}" for kind, n in self.decisions.items()) or "none yet") + share),
            ("anchors", f"{len(self.anchors)}, at {tokens} tokens" if self.anchors else "none"),
            ("bytes", f"{self.anchor_bytes / 2**20:.1f} of {self.budget_bytes / 2**20:.0f} MiB, shared blocks apart"),
            ("host", f"{self.host.entries} prefixes, {self.host.bytes / 2**20:.1f} MiB, {self.host.hits} hits"),
        ]

    def __str__(self) -> str:
        return as_text(self.rows())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return as_html(self.rows())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Start:
    """Where a run starts, and what it goes on from; both stay valid whatever is deleted meanwhile.

    Attributes:
        source: of `decision`, None for a reset.
        host: what host memory said of the prompt.
    """

    decision: Decision
    source: Anchor | HostPrefix | None
    host: HostPrefix | Miss
    n_prompt: int


class Prefixes:
    """What the runs of one engine share; only the serving thread calls what takes the engine.

    Args:
        budget_bytes: of the snapshots on the device.
        host_mib: of the prefixes in host memory; 0 keeps none.
    """

    def __init__(self, *, budget_bytes: int = BUDGET_BYTES, host_mib: float = 0.0, policy: Policy = DEFAULT) -> None:
        self._policy = policy
        self._anchors, self._host = Anchors(budget_bytes), HostCache(host_mib, floor=policy.host_floor)
        self._on_thread: Callable[[Callable[[Engine], Any]], Any] | None = None
        self._log: deque[Decided] = deque(maxlen=LOGGED)
        self._n_decided = 0
        self._reused = self._computed = 0
        self._decisions: dict[str, int] = {}

    @property
    def policy(self) -> Policy:
        """When a prefix is taken; set it to another `Policy` at any time, the next run goes by it."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        if not isinstance(policy, Policy):
            raise RequestError(
                f"policy is {policy!r}; it must be a dsv4nb.Policy, such as "
                "dataclasses.replace(m.cache.policy, live=False)",
                param="policy",
            )
        self._policy = policy
        self._host.floor = policy.host_floor

    # for runs

    def decide(self, prompt: Sequence[int], ledger: Sequence[int]) -> Start:
        """Choose where a run starts; nothing is changed.

        Args:
            ledger: what the chat's last run left committed.
        """
        anchors, policy = self._anchors.committed, self.policy
        own = self.of(ledger)
        found = self._host.find(prompt) if policy.host else "empty"
        known = Known(
            ledger=ledger,
            has_logits=own is not None and own.logits is not None,
            is_healthy=own is not None,
            anchors=[anchor.ids for anchor in anchors],
            anchors_with_logits=[i for i, anchor in enumerate(anchors) if anchor.logits is not None],
            host=[found.length] if isinstance(found, HostPrefix) else (),
        )
        decision = decide(prompt, known, policy)
        source: Anchor | HostPrefix | None = None
        if decision.kind in ("exact", "live"):
            source = own
        elif decision.index is not None:
            source = anchors[decision.index]
        elif decision.kind == "host":
            source = found if isinstance(found, HostPrefix) else None
        return Start(decision=decision, source=source, host=found, n_prompt=len(prompt))

    def resume(self, engine: Engine, start: Start) -> tuple[DecodeState, tuple[int, ...], Row | None]:
        """Make the state to start from; return it with its ids, and the row behind them where it was kept."""
        self._n_decided += 1
        self._log.append(
            Decided(number=self._n_decided, at=datetime.now(), n_prompt=start.n_prompt, decision=start.decision)
        )
        source = start.source
        if source is None:
            return engine.new_state(), (), None
        if isinstance(source, HostPrefix):
            snapshot = engine.load(source.arrays, source.length)
            try:
                return engine.restore(snapshot), source.ids, None
            finally:
                snapshot.release()
        self._anchors.touch(source)
        return engine.restore(source.snapshot), source.ids, source.logits

    def mark(self, engine: Engine, state: DecodeState, ids: Sequence[int], row: Row | None) -> None:
        """Capture where a run stands; it counts once the run has ended well.

        A run whose snapshot cannot be taken is none the worse for it: later ones go on from an earlier one.
        """
        if self.policy.anchors or self.policy.live:
            # snapshots are about equally large: room for one more is made before it is taken
            self._anchors.make_room(max((a.snapshot.nbytes for a in self._anchors.committed), default=0))
            try:
                snapshot = engine.capture(state)
            except Exception as error:  # a lost device fails the next forward too
                logger.debug("no snapshot was taken tokens=%d kind=%s", len(ids), type(error).__name__, exc_info=error)
                return
            self._anchors.add(Anchor(ids=tuple(ids), snapshot=snapshot, logits=row))

    def commit(self, engine: Engine, prompt: Sequence[int], start: Start) -> None:
        """The run ended well: what it marked can be gone on from. A prompt that nobody knew goes to host memory too."""
        self._anchors.commit()
        decision = start.decision
        self._reused += decision.length
        self._computed += decision.computed
        self._decisions[decision.kind] = self._decisions.get(decision.kind, 0) + 1
        if decision.kind in ("host", "reset") and self.policy.host:
            self._host.count(start.host)
            self._store(engine, prompt)

    def drop(self) -> None:
        """The run was stopped or failed: what it marked is forgotten."""
        self._anchors.drop_pending()

    # for people

    def stats(self) -> CacheStats:
        """Return what there is."""
        anchors = self._anchors.committed
        return CacheStats(
            anchors=tuple(
                AnchorEntry(
                    id=a.id,
                    tokens=len(a.ids),
                    nbytes=a.snapshot.nbytes,
                    has_logits=a.logits is not None,
                    is_pinned=self._anchors.is_pinned(a),
                )
                for a in anchors
            ),
            anchor_bytes=self._anchors.nbytes,
            budget_bytes=self._anchors.budget_bytes,
            host=self._host.stats(),
            reused=self._reused,
            computed=self._computed,
            decisions=dict(self._decisions),
        )

    @property
    def log(self) -> list[Decided]:
        """The latest decisions about where a run starts, the newest first; runs that were stopped are among them."""
        return list(self._log)[::-1]

    @property
    def host(self) -> list[HostEntry]:
        """The prefixes in host memory."""
        return self._host.entries()

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        """The anchors that can be gone on from, least recently used first."""
        return self._anchors.committed

    def host_ids(self, id: int) -> tuple[int, ...]:
        """Return the ids of a prefix in host memory.

        Raises:
            RequestError: there is no such prefix.
        """
        return self._host.prefix(id).ids

    def pin_anchor(self, id: int, is_pinned: bool = True) -> None:
        """Keep an anchor whatever comes, or no longer; behind the requests that are in the queue.

        Raises:
            RequestError: there is no such anchor, or pinned ones would take more than the budget.
        """
        self._act(lambda _: self._anchors.pin(id, is_pinned))

    def delete_anchor(self, id: int) -> None:
        """Forget an anchor, behind the requests that are in the queue.

        Raises:
            RequestError: there is no such anchor.
        """
        self._act(lambda _: self._anchors.delete(id))

    def store(self, id: int) -> int:
        """Copy an anchor to host memory, behind the requests that are in the queue; return the id of the prefix.

        Raises:
            RequestError: there is no such anchor, or host memory does not take it.
        """
        return self._act(lambda engine: self._to_host(engine, id))

    def restore(self, id: int) -> int:
        """Bring a prefix from host memory to the device, behind the requests that are in the queue.

        A run that begins with it then starts from there without copying.

        Returns:
            The id of the anchor.

        Raises:
            RequestError: there is no such prefix, or it is on the device already.
        """
        return self._act(lambda engine: self._to_device(engine, id))

    def pin(self, id: int, is_pinned: bool = True) -> None:
        """Keep a prefix in host memory whatever comes, or no longer."""
        self._host.pin(id, is_pinned)

    def delete(self, id: int) -> None:
        """Forget a prefix in host memory."""
        self._host.delete(id)

    def clear(self) -> None:
        """Forget everything, behind the requests that are in the queue; returns when it is done."""
        self._act(lambda _: self.forget())

    def forget(self) -> None:
        """Forget everything, on the serving thread."""
        self._anchors.clear()
        self._host.clear()

    def serve(self, on_thread: Callable[[Callable[[Engine], Any]], Any]) -> None:
        """Let `on_thread` carry out on the serving thread what would disturb a run from another one."""
        self._on_thread = on_thread

    def of(self, ids: Sequence[int]) -> Anchor | None:
        """Return the anchor of exactly these ids."""
        wanted = tuple(ids)
        return next((anchor for anchor in self._anchors.committed if anchor.ids == wanted), None)

    def adopt(self, anchor: Anchor) -> None:
        """Take over an anchor from elsewhere, a file for instance."""
        self._anchors.add(anchor)
        self._anchors.commit()

    def _act(self, job: Callable[[Engine], _T]) -> _T:
        assert self._on_thread is not None, "no server serves these prefixes"
        done: _T = self._on_thread(job)
        return done

    def _to_host(self, engine: Engine, id: int) -> int:
        anchor, host = self._anchors.get(id), self._host
        n = len(anchor.ids)
        if not host.budget_bytes:
            raise RequestError("host memory keeps nothing; load the model with host_cache_mib=", param="id")
        if n < host.floor:
            raise RequestError(
                f"anchor {id} has {n} tokens; host memory takes prefixes of {host.floor} and more, see "
                "m.cache.policy.host_floor",
                param="id",
            )
        if not host.wants(anchor.ids):
            raise RequestError(f"the {n} tokens of anchor {id} are in host memory already", param="id")
        arrays = engine.dump(anchor.snapshot)
        stored = host.insert(anchor.ids, arrays)
        if stored is None:
            need = sum(array.nbytes for array in arrays.values()) / 2**20
            raise RequestError(
                f"anchor {id} takes {need:.1f} MiB; host memory has {host.budget_bytes / 2**20:.1f} MiB with what "
                "is pinned. Unpin or delete one, or load with a larger host_cache_mib",
                param="id",
            )
        return stored

    def _to_device(self, engine: Engine, id: int) -> int:
        prefix = self._host.prefix(id)
        if self.of(prefix.ids) is not None:
            raise RequestError(f"the {prefix.length} tokens of prefix {id} are on the device already", param="id")
        anchor = Anchor(ids=prefix.ids, snapshot=engine.load(prefix.arrays, prefix.length))
        self.adopt(anchor)
        return anchor.id

    def _store(self, engine: Engine, prompt: Sequence[int]) -> None:
        """Put the longest beginning of the prompt that was marked into host memory, if it can be had."""
        anchor = self._anchors.longest(prompt)
        if anchor is None or not self._host.wants(anchor.ids):
            return
        try:
            arrays = engine.dump(anchor.snapshot)
        except Exception as error:  # the reply is there, and needs none of this
            logger.debug("nothing was stored tokens=%d kind=%s", len(anchor.ids), type(error).__name__, exc_info=error)
            return
        self._host.insert(anchor.ids, arrays)
