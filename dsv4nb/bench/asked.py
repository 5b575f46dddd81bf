"""What a measurement on random weights is asked to run, and what it says it ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dsv4nb.checkpoint.config import ModelConfig, from_hf
from dsv4nb.checkpoint.synthetic import SHAPES, hf_config
from dsv4nb.engine.prefill import FAST_ROWS, PrefillForm
from dsv4nb.engine.protocol import MAX_ROWS
from dsv4nb.errors import RequestError
from dsv4nb.weights.placement import SharedKind

Routes = Literal["free", "measured"]

SPAN = 256  # positions behind a context that the samples of it walk along


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One measurement.

    Attributes:
        shape: a name of `dsv4nb.checkpoint.synthetic.SHAPES`.
        devices: GPU ids, such as "0" or "0,1".
        placement: how several share the model, "tensor" or "pipeline"; as `dsv4nb.load` chooses when None.
        layers, experts: as many as the shape has when None.
        changes: other fields of config.json.
        contexts: positions that the measured rows stand at.
        widths: rows of a forward.
        routes: "free": the random router's; "measured": tables with the unions of a text.
        graphs: replay captured graphs.
        seconds: no new turn of the arms begins after this.
        max_seq: positions that the caches have room for; just enough when None.
        form, chunk_rows: of prompts: how they are read, and the rows of one fast chunk.
        drafter: make the drafter too, where the shape has one.
    """

    shape: str
    devices: str = "0"
    placement: SharedKind | None = None
    layers: int | None = None
    experts: int | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    contexts: tuple[int, ...] = (1024,)
    widths: tuple[int, ...] = (1, 2, 4, 6)
    routes: Routes = "free"
    graphs: bool = True
    seconds: float = 60.0
    max_seq: int | None = None
    form: PrefillForm = "exact"
    chunk_rows: int = FAST_ROWS
    drafter: bool = False
    seed: int = 0

    def config(self) -> ModelConfig:
        """Return the model that is made up.

        Raises:
            RequestError: there is no such shape.
            CheckpointError: a field has a bad value.
        """
        return from_hf(hf_config(self.shape, self.all_changes))

    @property
    def all_changes(self) -> Mapping[str, Any]:
        """`changes`, with the numbers of layers and experts among them."""
        counts = {"num_hidden_layers": self.layers, "n_routed_experts": self.experts}
        return {**{name: value for name, value in counts.items() if value is not None}, **self.changes}

    def room(self, rows: int) -> int:
        """Return the positions of the caches, so that every context has `rows` rows of room behind it.

        Raises:
            RequestError: `max_seq` is too little for that.
        """
        needed = max(self.contexts) + rows
        if self.max_seq is None:
            return needed
        if self.max_seq < needed:
            raise RequestError(
                f"max_seq is {self.max_seq}; context {max(self.contexts)} needs {needed} positions", param="max_seq"
            )
        return self.max_seq

    def require_widths(self) -> None:
        """Refuse forwards that the engine does not run.

        Raises:
            RequestError: a width is none of 1 … MAX_ROWS.
        """
        for width in self.widths:
            if not 1 <= width <= MAX_ROWS:
                raise RequestError(f"widths has {width}; a forward has 1 to {MAX_ROWS} rows", param="widths")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What was run.

    Attributes:
        layers, experts: that were run; `layers_of` and `experts_of` are those of the shape.
        devices: each with its name; shared: how they share the model.
        resident_bytes: of the weights on each device.
        copy_tb_s: copy rate of the first device in this process, bytes read plus bytes written; None on none.
        routes: "free" or "measured".
    """

    shape: str
    layers: int
    layers_of: int
    experts: int
    experts_of: int
    changed: tuple[str, ...]
    devices: tuple[str, ...]
    shared: str
    max_seq: int
    routes: Routes
    graphs: bool
    resident_bytes: tuple[int, ...]
    load_s: float
    copy_tb_s: float | None
    torch: str

    def rows(self) -> list[tuple[str, str]]:
        """Return the facts as (label, text)."""
        changed = f"; changed: {', '.join(self.changed)}" if self.changed else ""
        table = "tables with the unions of a text" if self.routes == "measured" else "free, of the random router"
        rate = "not measured: no GPU" if self.copy_tb_s is None else f"{self.copy_tb_s:.2f} TB/s read and written"
        held = ", ".join(f"{n / 1e9:.2f} GB" for n in self.resident_bytes)
        return [
            ("shape", f"{self.shape}, random weights{changed}"),
            ("layers", f"{self.layers} of {self.layers_of} were run" + self._scaling(self.layers, self.layers_of)),
            ("experts", f"{self.experts} of {self.experts_of}"),
            ("devices", ", ".join(self.devices)),
            ("placement", self.shared),
            ("weights", f"{held}, made in {self.load_s:.1f} s"),
            ("prefix", f"random cache rows, room for {self.max_seq} positions"),
            ("routes", table),
            ("graphs", "captured and replayed" if self.graphs else "off, launched kernel by kernel"),
            ("copy rate", rate),
            ("torch", self.torch),
        ]

    @staticmethod
    def _scaling(ran: int, of: int) -> str:
        return "" if ran == of else f"; no number here is scaled up to {of}"


def ran(
    asked: Asked,
    config: ModelConfig,
    *,
    devices: tuple[str, ...],
    shared: str,
    max_seq: int,
    resident_bytes: tuple[int, ...],
    load_s: float,
    copy_tb_s: float | None,
) -> Ran:
    """Put together what was run."""
    import torch

    whole = SHAPES[asked.shape].fields
    return Ran(
        shape=asked.shape,
        layers=config.num_hidden_layers,
        layers_of=whole["num_hidden_layers"],
        experts=config.n_routed_experts,
        experts_of=whole["n_routed_experts"],
        changed=tuple(f"{name} {value}" for name, value in asked.changes.items()),
        devices=devices,
        shared=shared,
        max_seq=max_seq,
        routes=asked.routes,
        graphs=asked.graphs,
        resident_bytes=resident_bytes,
        load_s=load_s,
        copy_tb_s=copy_tb_s,
        torch=str(torch.__version__),
    )
