"""`load`: a folder → a model that answers. The one place that assembles the parts."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from dsv4nb.checkpoint.jsonfile import read_object
from dsv4nb.checkpoint.opening import Checkpoint, open_checkpoint
from dsv4nb.checkpoint.revision import OVERRIDE, Revision
from dsv4nb.config import SamplerConfig
from dsv4nb.contract import CONTRACTS, Contract
from dsv4nb.errors import CheckpointError, ModelClosed, RequestError
from dsv4nb.events import Event, Generation, Token
from dsv4nb.info import LoadInfo
from dsv4nb.session.chat import Chat
from dsv4nb.session.job import OnEnd
from dsv4nb.session.limits import room
from dsv4nb.session.request import Composer, RequestOptions, Tokenizer, refuse_unknown
from dsv4nb.session.server import Server
from dsv4nb.stream.ticket import Ticket

if TYPE_CHECKING:
    from dsv4nb.engine.protocol import Engine

TOY = Path(__file__).parent / "toy" / "model"
CPU_MAX_SEQ = 4096  # longer prompts take minutes on a CPU; max_seq= asks for more
GENERATION_CONFIG = "generation_config.json"

_KEYWORDS = ("devices", "max_seq", "contract", "encoding", "name")
_REVISIONS: tuple[Revision, ...] = ("preview", "v0731")


def load(
    path: str | os.PathLike[str],
    *,
    devices: str | None = None,
    max_seq: int | None = None,
    contract: str | Contract | None = None,
    encoding: Revision | None = None,
    name: str | None = None,
    **unknown: object,
) -> Model:
    """Load a checkpoint.

    The same folder with the same options is loaded once: a second call returns another handle of the same engine.

    Args:
        path: the checkpoint's folder, or "toy" for the bundled model.
        devices: "cpu".
        max_seq: the longest sequence, prompt and reply together.
        contract: roundings of the arithmetic, in the place of the checkpoint's own; see `dsv4nb.contract`.
        encoding: "preview" or "v0731", where the checkpoint does not tell.
        name: how screens call the model.

    Raises:
        CheckpointError: the folder holds no checkpoint that can run; nothing was loaded.
        RequestError: an option is unknown or its value is refused.
    """
    refuse_unknown(unknown, _KEYWORDS)
    if devices not in (None, "cpu"):
        raise RequestError(f"devices is {devices!r}; this version runs on 'cpu'", param="devices")
    folder = _folder(path)
    chosen = _contract(contract)
    if encoding is not None and encoding not in _REVISIONS:
        raise RequestError(f"encoding is {encoding!r}; it must be one of {', '.join(_REVISIONS)}", param="encoding")
    key = (folder, max_seq, chosen, encoding, name)
    return _shelf().take(key, lambda: _build(folder, max_seq, chosen, encoding, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What handles of one model share; `server` closes the engine."""

    engine: Engine
    server: Server
    composer: Composer
    tokenizer: Tokenizer
    info: LoadInfo


class Model:
    """A loaded model: answers, streams and chats.

    Requests of all handles run one after the other, on a thread of their own. Closing one handle leaves the others
    working; the last one frees the memory.

    Args:
        release: called once, when the handle is closed or gone.
    """

    def __init__(self, parts: Parts, release: Callable[[], None]) -> None:
        self._parts: Parts | None = parts
        self._name = parts.info.name
        self._release = weakref.finalize(self, release)
        self._release.atexit = False  # at exit the thread is a daemon and the memory the system's
        self._last: Generation | None = None

    # asking

    def generate(
        self,
        prompt: str | None = None,
        *,
        on_token: Callable[[Token], object] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Answer a prompt and return the whole reply.

        A kernel interrupt stops the reply; what there was of it is in `last`.

        Args:
            prompt: what a person says; `messages=` takes a conversation, `prompt_ids=` bare ids.
            on_token: called with each token as it comes, on this thread.
            options: system, thinking, effort, tools, max_new, temperature, top_k, top_p, min_p, seed, stop,
                stop_token_ids; see `RequestOptions`.

        Raises:
            RequestError: the request was refused; nothing ran.
            EngineError: the engine failed.
            ModelClosed: the model was closed.
        """
        ticket = self.submit(prompt, **options)
        try:
            if on_token is not None:
                with contextlib.closing(ticket.events) as events:
                    for event in events:
                        if isinstance(event, Token):
                            on_token(event)
            return ticket.result()
        finally:
            self._last = ticket.outcome or self._last

    def stream(self, prompt: str | None = None, **options: Unpack[RequestOptions]) -> Iterator[Event]:
        """Answer a prompt and return its events as they come; leaving the loop stops the reply."""
        return self.submit(prompt, **options).events

    def astream(self, prompt: str | None = None, **options: Unpack[RequestOptions]) -> AsyncIterator[Event]:
        """Answer a prompt and return its events for `async for`; leaving the loop stops the reply."""
        return self.submit(prompt, **options).aevents

    def submit(self, prompt: str | None = None, **options: Unpack[RequestOptions]) -> Ticket:
        """Put a request in the queue and return its ticket at once."""
        return self._submit(prompt, options, None)

    def chat(self, **options: Unpack[RequestOptions]) -> Chat[Ticket]:
        """Start a conversation; displaying it shows a chat to type in.

        Args:
            options: of every turn, as in `generate`.
        """
        self._open()
        return Chat(self._name, self._door, options, _show)

    @property
    def last(self) -> Generation | None:
        """The newest result of `generate`, also one that was interrupted."""
        return self._last

    # looking

    def render(self, prompt: str | None = None, **options: Unpack[RequestOptions]) -> str:
        """Return the text that the model would read, control tokens spelt out."""
        return self._open().composer.text(prompt, options)

    def tokenize(self, text: str, *, control: bool = False) -> list[int]:
        """Return the ids of a text.

        Args:
            control: read control tokens in the text as such, as in what `render` returns.
        """
        tokenizer = self._open().tokenizer
        return tokenizer.encode_trusted(text) if control else tokenizer.encode_plain(text)

    @property
    def info(self) -> LoadInfo:
        """The facts of the model."""
        return self._open().info

    @property
    def name(self) -> str:
        """How screens call it."""
        return self._name

    @property
    def max_seq(self) -> int:
        """The longest sequence, prompt and reply together."""
        return self._open().composer.max_seq

    @property
    def engine(self) -> Engine:
        """The engine; only the serving thread may call it while requests run."""
        return self._open().engine

    # ending

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._parts is None

    def close(self) -> None:
        """Let go of the model; idempotent. The last handle stops what runs and frees the memory."""
        self._parts = None
        self._release()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> Parts:
        if self._parts is None:
            raise ModelClosed(self._name)
        return self._parts

    def _submit(self, prompt: str | None, options: Mapping[str, Any], on_end: OnEnd | None) -> Ticket:
        parts = self._open()
        return Ticket(parts.server.submit(parts.composer.request(prompt, options), on_end), owner=self)

    def _door(self, options: Mapping[str, Any], on_end: OnEnd) -> Ticket:
        return self._submit(None, options, on_end)

    def __repr__(self) -> str:
        return f"{self._name} (closed)" if self._parts is None else str(self._parts.info)

    def _repr_html_(self) -> str | None:
        return None if self._parts is None else self._parts.info._repr_html_()


def _show(chat: Chat[Ticket]) -> None:
    from dsv4nb.widgets.chat import show  # needs anywidget, which a terminal may lack

    show(chat)


class Shelf:
    """Loaded parts by how they were asked for, each as long as a handle holds it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a handle may be collected while this thread holds it
        self._held: dict[object, tuple[Parts, int]] = {}

    def take(self, key: object, build: Callable[[], Parts]) -> Model:
        """Return a handle of the parts under `key`, building them if there are none."""
        with self._lock:
            parts, handles = self._held.get(key) or (build(), 0)
            self._held[key] = (parts, handles + 1)
        return Model(parts, lambda: self._put_back(key))

    def _put_back(self, key: object) -> None:
        with self._lock:
            parts, handles = self._held[key]
            if handles > 1:
                self._held[key] = (parts, handles - 1)
                return
            del self._held[key]
        parts.server.close()


@cache
def _shelf() -> Shelf:
    return Shelf()


def _folder(path: str | os.PathLike[str]) -> Path:
    if path != "toy":
        return Path(path).expanduser().absolute()
    if not (TOY / "config.json").exists():
        raise CheckpointError("the bundled model is not in this installation; pass the folder of a checkpoint")
    return TOY


def _contract(contract: str | Contract | None) -> Contract | None:
    if contract is None or isinstance(contract, Contract):
        return contract
    if contract not in CONTRACTS:
        raise RequestError(f"contract is {contract!r}; it must be one of {', '.join(CONTRACTS)}", param="contract")
    return CONTRACTS[contract]


def _build(
    folder: Path, max_seq: int | None, contract: Contract | None, encoding: Revision | None, name: str | None
) -> Parts:
    """Check everything, then load."""
    started = time.perf_counter()
    checkpoint = open_checkpoint(folder)
    revision, reason, is_certain = _revision(checkpoint, encoding)
    limit = _max_seq(max_seq, checkpoint.config.max_position_embeddings)
    sampler, source = _sampler(folder)

    from dsv4nb.encoding.tokens import ChatTokenizer
    from dsv4nb.engine.cpu import CpuEngine  # brings torch

    assert checkpoint.tokenizer_path is not None
    tokenizer = ChatTokenizer.from_file(checkpoint.tokenizer_path)
    engine = CpuEngine.from_checkpoint(checkpoint, contract=contract, max_seq=limit)
    called = name or checkpoint.name
    config = checkpoint.config
    info = LoadInfo(
        name=called,
        path=str(folder),
        device="CPU",
        n_layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        n_experts=config.n_routed_experts,
        n_active=config.num_experts_per_tok,
        window=config.sliding_window,
        vocab=config.vocab_size,
        revision=revision,
        revision_reason=reason,
        revision_is_certain=is_certain,
        contract=(contract or checkpoint.contract).name,
        contract_reason=checkpoint.contract_reason if contract is None else "asked for by contract=",
        max_seq=limit,
        n_parameters=checkpoint.n_weights,
        weights=checkpoint.quant_label,
        disk_bytes=checkpoint.file_bytes,
        load_s=time.perf_counter() - started,
        sampler=sampler,
        sampler_source=source,
    )
    return assemble(engine, tokenizer, info, revision)


def assemble(engine: Engine, tokenizer: Tokenizer, info: LoadInfo, revision: Revision) -> Parts:
    """Start the serving thread of an engine."""
    composer = Composer(
        tokenizer=tokenizer,
        revision=revision,
        vocab_size=engine.vocab_size,
        max_seq=engine.max_seq,
        sampler=info.sampler,
    )
    server = Server(info.name, engine, tokenizer)
    return Parts(engine=engine, server=server, composer=composer, tokenizer=tokenizer, info=info)


def _revision(checkpoint: Checkpoint, encoding: Revision | None) -> tuple[Revision, str, bool]:
    found = checkpoint.encoding
    if encoding is not None:
        return encoding, "asked for by encoding=", True
    if found.revision is None:
        raise CheckpointError(f"the chat encoding is unknown: {found.reason}; {OVERRIDE}", param="encoding")
    return found.revision, found.reason, found.certain


def _max_seq(asked: int | None, declared: int) -> int:
    if asked is None:
        return min(declared, CPU_MAX_SEQ)
    if isinstance(asked, bool) or not isinstance(asked, int) or room(asked) < 1 or asked > declared:
        raise RequestError(
            f"max_seq is {asked!r}; it must be a whole number from {1 - room(0)} to {declared}, "
            "the positions this checkpoint was made for",
            param="max_seq",
        )
    return asked


def _sampler(folder: Path) -> tuple[SamplerConfig, str]:
    """The checkpoint's own defaults, and where they come from."""
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return SamplerConfig(), "DeepSeek's own, the checkpoint names none"
    try:
        raw = read_object(path)
        given = {key: float(raw[key]) for key in ("temperature", "top_p") if raw.get(key) is not None}
        return SamplerConfig(**given), GENERATION_CONFIG
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}", param=GENERATION_CONFIG) from error
