"""`load`: a checkpoint on disk → a handle that answers."""

from __future__ import annotations

import difflib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4nb import environ
from dsv4nb.checkpoint.identity import fingerprint_of
from dsv4nb.checkpoint.jsonfile import read_object
from dsv4nb.checkpoint.opening import Checkpoint, open_checkpoint
from dsv4nb.checkpoint.revision import OVERRIDE
from dsv4nb.config import SamplerConfig, SpecConfig, parse_window
from dsv4nb.contract import CONTRACTS, Contract
from dsv4nb.encoding.constants import EFFORTS, Revision
from dsv4nb.encoding.tokens import ChatTokenizer
from dsv4nb.engine.gpus import PIPELINE, given_back_on_failure, placed, require_gpus, require_placement
from dsv4nb.engine.prefill import FAST_ROWS, FAST_ROWS_MAX, FEWEST_ROWS, FORMS, PrefillForm
from dsv4nb.errors import CheckpointError, DamagedCheckpoint, EncodingError, RequestError
from dsv4nb.handle import Model, Parts
from dsv4nb.info import Capabilities, load_info
from dsv4nb.progress import shown
from dsv4nb.session.chat import Chat
from dsv4nb.session.limits import SLACK
from dsv4nb.session.limits import room as longest_prompt
from dsv4nb.session.prefixes import BUDGET_BYTES, Prefixes
from dsv4nb.session.request import (
    Limits,
    Options,
    refuse_unknown,
    sampler_config,
)
from dsv4nb.session.server import Server
from dsv4nb.stream.loading import Loading
from dsv4nb.weights.placement import SharedKind
from dsv4nb.weights.progress import LoadStep

if TYPE_CHECKING:
    from dsv4nb.engine.cpu import CpuEngine
    from dsv4nb.engine.device import DeviceEngine

__all__ = ["Model", "Parts", "load", "open_chat"]

TOY = "toy"  # the bundled model, by this name instead of a path
CPU_THREADS = 1
CPU_MAX_SEQ = 4096  # a longer prompt takes minutes on a CPU before its first token
GPU_MAX_SEQ = 131_072  # caches grow as chats do; this much room costs angles and scratch, 0.3 GB of each GPU

_TOY_FOLDER = Path(__file__).parent / "toy" / "model"

_LOAD_NAMES = (
    *("path", "devices", "placement", "max_seq", "contract", "encoding", "name", "cache_mib", "host_cache_mib"),
    *("drafter", "spec_depth", "spec_window", "progress", "prefill", "prefill_rows", "warmup"),
)


def open_chat(path: str | Path, model: Model, **options: Any) -> Chat:
    """Go on from a saved chat; see `Model.open_chat`."""
    return model.open_chat(path, **options)


def load(
    path: str | Path,
    *,
    devices: str | int | Sequence[str | int] | None = None,
    placement: str | None = None,
    max_seq: int | None = None,
    contract: str | None = None,
    encoding: str | None = None,
    name: str | None = None,
    cache_mib: float = BUDGET_BYTES / 2**20,
    host_cache_mib: float = 0.0,
    drafter: bool | str = "auto",
    spec_depth: int | None = None,
    spec_window: str | Sequence[Any] | None = None,
    prefill: str | None = None,
    prefill_rows: int | None = None,
    warmup: bool | None = None,
    progress: object = None,
    **unknown: object,
) -> Model:
    """Load a checkpoint. The same folder with the same options gives a handle on the same engine.

    Args:
        path: the folder that holds config.json, or "toy" for the bundled model.
        devices: "cpu", or the ids of GPUs, as 0 or (0, 1); the environment's DSV4NB_DEVICES when None, else "cpu".
        placement: how several GPUs share the model: "tensor", each of two has half of every large matrix; or
            "pipeline", each has some of the layers, one GPU after the other. When None, two share every layer, or are
            a pipeline where they do not reach each other's memory: the card says why.
        max_seq: longest sequence, prompt and reply together; the environment's DSV4NB_MAX_SEQ when None, else the
            model's own, at most 4096 on a CPU and 131072 on a GPU, where a longer one has to be asked for.
        contract: roundings of the arithmetic, instead of those that the checkpoint was published with.
        encoding: preview or v0731, for a checkpoint that does not tell.
        name: for people; the folder's when None.
        cache_mib: of the snapshots that chats go on from.
        host_cache_mib: of long prefixes in host memory; 0 keeps none. On a CPU it is the same memory.
        drafter: speculate with the checkpoint's DSpark drafter: True, False, or auto, where there is a sound one.
        spec_depth: rows of a verify forward at most, of requests that do not say; the environment's
            DSV4NB_SPEC_DEPTH when None.
        spec_window: the confidence window of requests that do not say; off when None.
        prefill: how prompts are read: "exact", as rows are, or "fast", in chunks that add in another order, on a GPU
            alone; fast on a GPU when None. A model that cannot be read so is read exactly, and its card says why.
        prefill_rows: tokens of one fast chunk, from 32 to 4096; 2048 when None.
        warmup: let a model on GPUs run once before it is handed over, so that no kernel is compiled in the first chat;
            True when None, unless the environment's DSV4NB_SKIP_WARMUP is 1. On a CPU nothing is compiled.
        progress: what shows how far it is: True, a panel in a notebook and a line in a terminal; None, the same once
            it takes long; False, nothing; or a `LoadPanel`, or a function that is called with a `LoadStep` after each
            tensor and may raise to stop.

    An interrupt, or Cancel in the panel, stops it at the next tensor; nothing stays loaded.

    Raises:
        LoadCancelled: somebody cancelled it in the panel.
        RequestError: an option is not understood, or there is no drafter that it could act on.
        CheckpointError: the checkpoint cannot be read; nothing was loaded. See its subclasses.
        NotEnoughMemory: the weights do not fit; nothing was read.
        EngineError: the engine cannot run it.
    """
    started = time.monotonic()
    refuse_unknown(unknown, _LOAD_NAMES, "load()")
    asked = environ.devices() if devices is None else environ.parse_devices(devices, "devices")
    gpus = _gpus(asked, placement)
    kind, why = placed(gpus, placement)
    form, rows = _prefill(prefill, prefill_rows, is_gpu=bool(gpus))
    warms = _warmup(warmup)
    override_contract = None if contract is None else _contract(contract)
    if encoding is not None and encoding not in EFFORTS:
        raise RequestError(f"encoding is {encoding!r}; it must be one of {', '.join(EFFORTS)}", param="encoding")
    is_toy = path == TOY
    folder = _TOY_FOLDER if is_toy else Path(path).expanduser().resolve()
    with given_back_on_failure(gpus), shown(name or (TOY if is_toy else folder.name), str(folder), progress) as loading:
        loading.tell(LoadStep(phase="headers"))
        checkpoint = open_checkpoint(folder)
        loading.name = name = name or (TOY if is_toy else checkpoint.name)
        most = GPU_MAX_SEQ if gpus else CPU_MAX_SEQ
        room = _room(max_seq, checkpoint.config.max_position_embeddings, most)
        prefixes = Prefixes(budget_bytes=_mib("cache_mib", cache_mib), host_mib=host_cache_mib)
        spec = _spec(checkpoint, drafter, spec_depth, spec_window)
        options = (contract, encoding, name, cache_mib, host_cache_mib, drafter, spec)
        key = (_fingerprint(folder), gpus, kind, room, *options)
        assemble = partial(
            _assemble,
            checkpoint,
            gpus,
            kind,
            why,
            room,
            override_contract,
            encoding,
            name,
            prefixes,
            spec,
            needs_drafter=drafter is True,
            prefill=form,
            prefill_rows=rows,
            warms=warms,
            is_toy=is_toy,
            started=started,
            loading=loading,
        )
        model = _shelf.take((*key, form, rows), assemble)
        try:
            loading.finish(model.info)
        except BaseException:  # an interrupt: nobody would ever get the handle
            model.close()
            raise
        return model


def _assemble(
    checkpoint: Checkpoint,
    gpus: tuple[int, ...],
    kind: SharedKind,
    why_kind: str,
    room: int,
    contract: Contract | None,
    encoding: str | None,
    name: str,
    prefixes: Prefixes,
    spec: SpecConfig | None,
    *,
    needs_drafter: bool,
    prefill: PrefillForm,
    prefill_rows: int,
    warms: bool,
    is_toy: bool,
    started: float,
    loading: Loading,
) -> Parts:
    """Build the parts of a model; everything that can be refused is refused before weights are read."""
    revision, encoding_note = _encoding(checkpoint, encoding)
    tokens = _tokenizer(checkpoint)
    recommended = _recommended(checkpoint.path)
    sampler = replace(SamplerConfig(), **recommended)  # type: ignore[arg-type]
    whose = "generation_config.json" if recommended else "DeepSeek's; the checkpoint names none"
    reason = checkpoint.contract_reason if contract is None else f"asked for; published with {checkpoint.contract.name}"
    engine: CpuEngine | DeviceEngine
    told, link = str(prefill), ""
    warm_up: Callable[[], None] | None = None
    if not gpus:
        from dsv4nb.engine.cpu import CpuEngine  # brings torch

        chosen = contract or checkpoint.contract
        engine = CpuEngine.from_checkpoint(
            checkpoint,
            contract=chosen,
            drafter=spec is not None,
            max_seq=room,
            threads=CPU_THREADS,
            on_progress=loading.tell,
        )
    else:
        from dsv4nb.engine import peer_link
        from dsv4nb.engine.device import DeviceEngine  # brings torch and Triton

        engine = DeviceEngine.from_checkpoint(
            checkpoint,
            device=[f"cuda:{gpu}" for gpu in gpus],
            placement=kind,
            contract=contract,
            drafter=spec is not None,
            max_seq=room,
            prefill=prefill,
            chunk_rows=prefill_rows,
            on_progress=loading.tell,
        )
        chosen = engine.contract
        prefill, told, link = engine.prefill_form, _prefill_told(engine, prefill_rows), peer_link.told(engine.links)
        reason = f"{reason}; in bfloat16 between the roundings"
        warm_up = partial(_warm_up, engine, loading) if warms else None
    with ExitStack() as failing:
        failing.callback(engine.close)
        loading.tell(replace(loading.step, phase="engine"))
        if needs_drafter and engine.draft_fault:
            raise CheckpointError(f"the drafter of {checkpoint.path} cannot run: {engine.draft_fault}", param="drafter")
        if warm_up is not None:
            warm_up()
        spec, no_drafter = (spec, "") if engine.block_size else (None, _no_drafter(checkpoint, engine.draft_fault))
        info = load_info(
            checkpoint,
            name=name,
            encoding=encoding_note,
            contract=f"{chosen.name} ({reason})",
            defaults=f"temperature {sampler.temperature:g}, top_p {sampler.top_p:g} ({whose})",
            drafter=f"DSpark, {engine.block_size} drafts a round" if spec is not None else f"none: {no_drafter}",
            max_seq=room,
            device=_device_name(gpus, kind, why_kind),
            threads=CPU_THREADS,
            load_s=time.monotonic() - started,
            prefill=told,
            link=link,
        )
        if is_toy:
            info = replace(info, provenance="bundled with dsv4nb")
        limits = Limits(
            max_seq=room,
            vocab_size=engine.vocab_size,
            revision=revision,
            sampler=sampler,
            spec=spec,
            no_drafter=no_drafter,
            block_size=engine.block_size,
            model=name,
            weights=fingerprint_of(checkpoint.path / "config.json", {e.file for e in checkpoint.entries.values()}),
            arithmetic=chosen.name,
            prefill=prefill,
        )
        caps = Capabilities(
            efforts=tuple(level for level in EFFORTS[revision] if level is not None),
            context_length=room,
            max_prompt=longest_prompt(room),
            n_vocab=tokens.vocab_size,
            recommended=recommended,
        )
        server = Server(engine, tokens, name, prefixes)
        failing.pop_all()
        return Parts(engine=engine, tokens=tokens, server=server, limits=limits, info=info, caps=caps)


def _warm_up(engine: DeviceEngine, loading: Loading) -> None:
    """Let a model on GPUs run once, and tell so."""
    from dsv4nb.engine import warm_up  # brings torch and Triton

    if not warm_up.is_of_use(engine):
        return
    loading.tell(step := replace(loading.step, phase="warming"))
    warm_up.warm_up(engine, lambda: loading.tell(step))


class _Shelf:
    """The engines of this process, each as long as a handle on it is open."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a forgotten handle may be released while another is being made
        self._parts: dict[object, tuple[Parts, int]] = {}

    def take(self, key: object, assemble: Callable[[], Parts]) -> Model:
        """Return a handle on the parts of `key`, made when there are none."""
        with self._lock:
            parts, handles = self._parts.get(key) or (assemble(), 0)
            self._parts[key] = (parts, handles + 1)
            return Model(parts, lambda: self._give_back(key))

    def _give_back(self, key: object) -> None:
        with self._lock:
            parts, handles = self._parts.pop(key)
            if handles > 1:
                self._parts[key] = (parts, handles - 1)
                return
        parts.server.close()


# one engine per checkpoint and process, however often the cell that loads it is run
_shelf = _Shelf()


def _fingerprint(folder: Path) -> tuple[object, ...]:
    """What tells a checkpoint from the one that stood in its place before."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    return (folder, *((path.name, stat.st_size, stat.st_mtime_ns) for path in files for stat in (path.stat(),)))


def _gpus(devices: str | tuple[int, ...] | None, placement: str | None) -> tuple[int, ...]:
    """Return the ids of the GPUs to run on, none for the CPU."""
    if isinstance(devices, tuple):
        return require_gpus(devices, placement)
    require_placement(placement, 0)
    return ()


def _device_name(gpus: tuple[int, ...], kind: SharedKind, why: str) -> str:
    """Say where a model runs, and why not as two GPUs usually share it."""
    if not gpus:
        return "CPU"
    *before, last = map(str, gpus)
    if not before:
        return f"GPU {last}"
    told = f"GPUs {', '.join(before)} and {last}"
    return told if kind != PIPELINE else f"{told}, one after the other{f' ({why})' if why else ''}"


def _prefill(form: object, rows: object, *, is_gpu: bool) -> tuple[PrefillForm, int]:
    """Return how prompts are read, and the rows of a fast chunk."""
    if form is None:
        form = "fast" if is_gpu else "exact"
    if form not in FORMS:
        raise RequestError(f"prefill is {form!r}; it must be one of {', '.join(FORMS)}", param="prefill")
    if form == "fast" and not is_gpu:
        raise RequestError("prefill is 'fast'; on a CPU there is 'exact' alone", param="prefill")
    if rows is None:
        return form, FAST_ROWS
    if form == "exact":
        raise RequestError(f"prefill_rows is {rows!r}; prefill='exact' has no chunks", param="prefill_rows")
    if isinstance(rows, bool) or not isinstance(rows, int) or not FEWEST_ROWS <= rows <= FAST_ROWS_MAX:
        raise RequestError(
            f"prefill_rows is {rows!r}; it must be an integer from {FEWEST_ROWS} to {FAST_ROWS_MAX}",
            param="prefill_rows",
        )
    return form, rows


def _prefill_told(engine: DeviceEngine, rows: int) -> str:
    """Say how an engine reads prompts, and why not as it was asked to."""
    if engine.prefill_form == "fast":
        return f"fast, in chunks of {rows:,}"
    return f"exact: {engine.prefill_fault}" if engine.prefill_fault else "exact"


def _warmup(given: object) -> bool:
    """Return whether a model on GPUs runs once before it is handed over."""
    skips = environ.skips_warmup()
    if given is not None and not isinstance(given, bool):
        raise RequestError(f"warmup is {given!r}; it must be True or False", param="warmup")
    return not skips if given is None else given


def _mib(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise RequestError(f"{name} is {value!r}; it must be a number of MiB above 0", param=name)
    return int(value * 2**20)


def _contract(name: str) -> Contract:
    if name not in CONTRACTS:
        near = difflib.get_close_matches(str(name), CONTRACTS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it must be one of {', '.join(CONTRACTS)}"
        raise RequestError(f"contract is {name!r}; {hint}", param="contract")
    return CONTRACTS[name]


def _room(max_seq: int | None, declared: int, most: int) -> int:
    """Return the longest sequence: the keyword's, else the environment's, else what the model declares."""
    asked = environ.max_seq() if max_seq is None else max_seq
    if asked is None:
        return min(declared, most)
    low = SLACK + 2  # one token of prompt and one of reply
    if isinstance(asked, bool) or not isinstance(asked, int) or not low <= asked <= declared:
        name = environ.MAX_SEQ if max_seq is None else "max_seq"
        raise RequestError(
            f"{name} is {asked!r}; it must be an integer from {low} to {declared}, which the model declares",
            param=name,
        )
    return asked


def _spec(checkpoint: Checkpoint, drafter: object, depth: object, window: object) -> SpecConfig | None:
    """Return how requests speculate that do not say, None for a model that is loaded without its drafter."""
    if drafter not in ("auto", True, False) or not isinstance(drafter, str | bool):
        raise RequestError(f"drafter is {drafter!r}; it must be 'auto', True or False", param="drafter")
    has_one = checkpoint.drafter == "dspark"
    if drafter is True and not has_one:
        raise RequestError(
            f"drafter=True, but {_no_drafter(checkpoint, '')}; load it without drafter=, it decodes plainly",
            param="drafter",
        )
    if drafter is False or not has_one:
        for name, value in (("spec_depth", depth), ("spec_window", window)):
            if value is not None:
                why = "the drafter is off" if has_one else _no_drafter(checkpoint, "")
                raise RequestError(f"{name} has nothing to act on: {why}; leave it out", param=name)
        return None
    dspark = checkpoint.config.dspark
    assert dspark is not None
    policy, tau, floor = ("off", None, None) if window is None else parse_window(window)
    asked: Any = environ.spec_depth() if depth is None else depth
    config = SpecConfig(depth=asked, window=policy, tau=tau, floor=floor)
    config.require_fits(dspark.block_size, depth_name=environ.SPEC_DEPTH if depth is None else "spec_depth")
    return config


def _no_drafter(checkpoint: Checkpoint, fault: str) -> str:
    if fault:
        return f"the drafter of the checkpoint cannot run: {fault}"
    return {
        "dspark": "it was loaded with drafter=False",
        "nextn": "the checkpoint has a NextN block, which is no DSpark drafter and is not run",
        "none": "the checkpoint has no drafter",
    }[checkpoint.drafter]


def _encoding(checkpoint: Checkpoint, asked: str | None) -> tuple[Revision, str]:
    """Return the revision of the chat encoding, and the revision with its reason in words."""
    found = checkpoint.encoding
    if asked is not None:
        revision: Revision = "preview" if asked == "preview" else "v0731"
        return revision, f"{revision} (asked for)"
    if found.revision is None:
        raise CheckpointError(
            f"nothing tells the chat encoding of {checkpoint.path}: {found.reason}; {OVERRIDE}", param="encoding"
        )
    doubt = "" if found.certain else f"uncertain, {OVERRIDE}: "
    return found.revision, f"{found.revision} ({doubt}{found.reason})"


def _tokenizer(checkpoint: Checkpoint) -> ChatTokenizer:
    config = checkpoint.config
    assert checkpoint.tokenizer_path is not None, checkpoint.path
    try:
        tokens = ChatTokenizer.from_file(checkpoint.tokenizer_path)
    except EncodingError as error:
        raise CheckpointError(str(error), param="tokenizer.json") from error
    for what, stated, found in (
        ("bos_token_id", config.bos_token_id, tokens.bos_id),
        ("eos_token_id", config.eos_token_id, tokens.eos_id),
    ):
        if stated != found:
            raise CheckpointError(f"config.json says {what} {stated}, tokenizer.json {found}", param=what)
    if max(tokens.control_ids) >= config.vocab_size:
        raise CheckpointError(
            f"tokenizer.json has the id {max(tokens.control_ids)}; config.json says vocab_size {config.vocab_size}",
            param="vocab_size",
        )
    return tokens


def _recommended(folder: Path) -> dict[str, float]:
    """Return the sampler values that the checkpoint names: temperature and top_p, or neither."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        raw = read_object(path)
        named = {name: raw[name] for name in ("temperature", "top_p") if raw.get(name) is not None}
        config = sampler_config(Options(seed=0, **named), SamplerConfig())
        return {name: getattr(config, name) for name in named}
    except (OSError, ValueError) as error:  # a RequestError is a ValueError
        raise DamagedCheckpoint(str(folder), [f"generation_config.json: {error}"]) from error
