"""Everything of earlier runs that a new one can go on from: anchors on the device, prefixes in host memory.

Prefixes are found by their ids, whatever chat they come from, so a fork, an edit, another try and a batch of prompts
with one beginning need no bookkeeping of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsv4nb.engine.protocol import DecodeState, Engine, Row
from dsv4nb.errors import RequestError
from dsv4nb.session.anchors import Anchor, Anchors
from dsv4nb.session.host_cache import HostCache, HostEntry, HostPrefix, HostStats, Miss
from dsv4nb.session.reuse import DEFAULT, Decision, Known, Policy, decide
from dsv4nb.tables import as_html, as_text

logger = logging.getLogger(__name__)

BUDGET_BYTES = 512 * 2**20  # of the anchors' snapshots


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorEntry:
    """One anchor as a person sees it.

    Attributes:
        nbytes: its own, without what it shares.
        has_logits: whether a prompt that ends there needs no computing.
    """

    tokens: int
    nbytes: int
    has_logits: bool


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


class Prefixes:
    """What the runs of one engine share; only the serving thread calls what takes the engine.

    Args:
        budget_bytes: of the snapshots on the device.
        host_mib: of the prefixes in host memory; 0 keeps none.
    """

    def __init__(self, *, budget_bytes: int = BUDGET_BYTES, host_mib: float = 0.0, policy: Policy = DEFAULT) -> None:
        self._policy = policy
        self._anchors, self._host = Anchors(budget_bytes), HostCache(host_mib, floor=policy.host_floor)
        self._on_thread: Callable[[Callable[[], None]], None] = lambda job: job()
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
        return Start(decision=decision, source=source, host=found)

    def resume(self, engine: Engine, start: Start) -> tuple[DecodeState, tuple[int, ...], Row | None]:
        """Make the state to start from; return it with its ids, and the row behind them where it was kept."""
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
                AnchorEntry(tokens=len(a.ids), nbytes=a.snapshot.nbytes, has_logits=a.logits is not None)
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
    def host(self) -> list[HostEntry]:
        """The prefixes in host memory."""
        return self._host.entries()

    def pin(self, id: int, is_pinned: bool = True) -> None:
        """Keep a prefix in host memory whatever comes, or no longer."""
        self._host.pin(id, is_pinned)

    def delete(self, id: int) -> None:
        """Forget a prefix in host memory."""
        self._host.delete(id)

    def clear(self) -> None:
        """Forget everything, behind the requests that are in the queue; returns when it is done."""
        self._on_thread(self.forget)

    def forget(self) -> None:
        """Forget everything, on the serving thread."""
        self._anchors.clear()
        self._host.clear()

    def serve(self, on_thread: Callable[[Callable[[], None]], None]) -> None:
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
