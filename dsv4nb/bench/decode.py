"""Load, first token and decode speed of a model: what a person waits for."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, replace

from dsv4nb.bench.spread import Spread
from dsv4nb.errors import Dsv4Error, RequestError
from dsv4nb.events import Done, Token
from dsv4nb.model import Model, load

_TEXT = "Anna went from Paris to Rome on Monday. The code word is silver otter. What is 47 + 38? "
_IMPORT = "import time; t = time.perf_counter(); import dsv4nb; print(time.perf_counter() - t)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `decode` measured.

    Attributes:
        import_s: of `dsv4nb` in an interpreter of its own.
        load_s: torch included, when nothing brought it before.
        first_token_s: from the call to the first token, prompt included.
        decode_tok_s: tokens after the first one, per second, on the plain route. `spec` measures the other one.
        peak_rss_mb: of this process so far, None where the system does not tell.
        threads: of one operation of the engine.
    """

    model: str
    device: str
    prompt_tokens: int
    new_tokens: int
    runs: int
    import_s: float
    load_s: float
    first_token_s: Spread
    decode_tok_s: Spread
    peak_rss_mb: float | None
    threads: int
    torch: str

    def rows(self) -> list[tuple[str, str]]:
        """Return the measurements as (label, text)."""
        rss = "unknown" if self.peak_rss_mb is None else f"{self.peak_rss_mb:.0f} MB"
        return [
            ("model", f"{self.model} on {self.device}"),
            ("asked", f"{self.prompt_tokens} prompt tokens, {self.new_tokens} tokens, {self.runs} runs"),
            ("import", f"{self.import_s:.3f} s"),
            ("load", f"{self.load_s:.2f} s"),
            ("first token", f"{self.first_token_s} s"),
            ("decode", f"{self.decode_tok_s} tok/s, plain"),
            ("peak memory", rss),
            ("threads", str(self.threads)),
            ("torch", self.torch),
        ]

    def __str__(self) -> str:
        return "\n".join(f"{label:<14}{value}" for label, value in self.rows())


def decode(path: str, *, prompt_tokens: int = 100, new: int = 64, runs: int = 3) -> Report:
    """Load a model and measure its `speed`."""
    import_s = _import_s()
    started = time.perf_counter()
    with load(path) as model:
        load_s = time.perf_counter() - started
        import torch  # loading brought it, and is the measurement that it belongs to

        first_token_s, decode_tok_s = speed(model, prompt_tokens=prompt_tokens, new=new, runs=runs)
        return Report(
            model=model.name,
            device=model.info.device,
            prompt_tokens=prompt_tokens,
            new_tokens=new,
            runs=runs,
            import_s=import_s,
            load_s=load_s,
            first_token_s=first_token_s,
            decode_tok_s=decode_tok_s,
            peak_rss_mb=peak_rss_mb(),
            threads=model.info.threads,
            torch=str(torch.__version__),
        )


def speed(model: Model, *, prompt_tokens: int = 100, new: int = 64, runs: int = 3) -> tuple[Spread, Spread]:
    """Let a model answer a prompt of exactly `prompt_tokens` ids with exactly `new` greedy tokens, plainly.

    One run before the first measured one warms caches. The ids that end a reply are ignored, so that every run is
    equally long.

    Returns:
        Seconds to the first token, and tokens per second after it.

    Raises:
        RequestError: the model has no room for such a reply.
    """
    times = [_run(model, prompt_tokens, new) for _ in range(runs + 1)][1:]
    return Spread.of([first for first, _ in times]), Spread.of([rate for _, rate in times])


def _run(model: Model, prompt_tokens: int, new: int) -> tuple[float, float]:
    """Return seconds to the first token and tokens per second after it."""
    ids = model.tokenize(_TEXT)
    ids = (ids * (prompt_tokens // len(ids) + 1))[:prompt_tokens]
    request = model.prepare(prompt_ids=ids, max_new=new, temperature=0.0, spec=False)
    if request.max_new < new:
        room = f"{request.max_new} after a prompt of {prompt_tokens}, with max_seq {model.max_seq}"
        raise RequestError(f"new is {new}; there is room for {room}", param="new")
    request = replace(request, eos=frozenset())
    started = time.perf_counter()
    first = None
    for event in model.start(request).events():
        if isinstance(event, Token) and event.id is not None and first is None:
            first = time.perf_counter()
        if isinstance(event, Done):
            assert first is not None and event.n_tokens == new, event
            return first - started, (new - 1) / (time.perf_counter() - first)
    raise Dsv4Error("a run of the measurement failed")


def _import_s() -> float:
    told = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True, timeout=60)
    return float(told.stdout)


def peak_rss_mb() -> float | None:
    """Return what this process has taken at most so far, in MB; None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e3)
