"""DeepSeek-V4 of `transformers` on the same random numbers, for measuring alone: nothing else imports `transformers`.

Where its FP8 and FP4 kernels load, it runs the codes as a checkpoint stores them; elsewhere their exact bfloat16
values, which are more than three times the bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dsv4nb import environ
from dsv4nb.bench.asked import Asked
from dsv4nb.checkpoint.config import from_hf
from dsv4nb.checkpoint.synthetic import hf_config
from dsv4nb.errors import NotEnoughMemory, RequestError
from dsv4nb.weights.synthetic import SyntheticReader

Stored = Literal["fp8fp4", "bf16"]

MODEL, NORM, HYPER = "DeepseekV4ForCausalLM", "DeepseekV4RMSNorm", "DeepseekV4HyperConnection"
FORMS = ("batched_mm", "grouped_mm")  # how it multiplies the chosen experts
UNNAMED = ("architectures", "model_type", "torch_dtype", "transformers_version")  # of config.json, not of a config


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What was loaded.

    Attributes:
        model: a `transformers` model, in evaluation.
        version: of transformers.
        stored: how its weights are held.
        why: its FP8 and FP4 kernels do not load; "" where they do.
        nbytes: of its parameters and buffers.
    """

    model: Any
    version: str
    stored: Stored
    why: str
    nbytes: int

    def forms(self) -> Iterator[str]:
        """Let the model multiply its experts in each way that it has, one after the other."""
        for form in FORMS:
            self.model.set_experts_implementation(form)
            yield form


def require_transformers() -> Any:
    """Return `transformers`.

    Raises:
        RequestError: it is not installed, or does not have the model.
    """
    try:
        import transformers
    except ImportError:
        raise RequestError(
            "with is transformers, which is not installed; `pip install transformers accelerate` brings it",
            param="with",
        ) from None
    if not hasattr(transformers, MODEL):
        raise RequestError(
            f"transformers {transformers.__version__} has no {MODEL}; 5.17 has one",
            param="peer",
        )
    return transformers


def missing_kernels(device: torch.device) -> str:
    """Say why FP8 and FP4 kernels of `transformers` do not run on a device; "" where they do."""
    if device.type != "cuda":
        return "they need a GPU"
    try:
        from transformers.integrations.finegrained_fp8 import load_finegrained_fp8_kernel

        load_finegrained_fp8_kernel()
    except Exception as error:  # whatever a peer fails by, it runs in bfloat16 then
        said, _, _ = f"{type(error).__name__}: {error}".partition("\n")
        return said
    return ""


def loaded(
    asked: Asked, devices: Sequence[torch.device], dtype: torch.dtype = torch.bfloat16, *, compiles: bool = False
) -> Loaded:
    """Make the model of a shape on devices, its layers one device after the other.

    Args:
        compiles: let torch compile its hyper connections, most of its launches; nothing else of it has the same shapes
            token after token.
        dtype: of what is not stored as codes.

    Raises:
        RequestError: `transformers` is not there or has no such model.
        CheckpointError: a field of the shape has a bad value.
        NotEnoughMemory: its weights are larger than what the GPUs have free.
    """
    transformers = require_transformers()
    why = missing_kernels(devices[0])
    stored: Stored = "bf16" if why else "fp8fp4"
    raw = hf_config(asked.shape, asked.all_changes, fmt=stored)
    fields = copy.deepcopy({name: value for name, value in raw.items() if name not in UNNAMED})  # it writes into them
    config = transformers.AutoConfig.for_model("deepseek_v4", **fields)
    reader = SyntheticReader(from_hf(raw), seed=asked.seed, device=devices[0])
    names = [name for name in reader.entries if not name.startswith("mtp.")]
    if devices[0].type == "cuda":
        _require_room(sum(reader.entries[name].nbytes for name in names), stored, devices)
    placed = {} if devices[0].type == "cpu" else {"device_map": _device_map(asked.config().num_hidden_layers, devices)}
    with _quiet(transformers):
        model = getattr(transformers, MODEL).from_pretrained(
            None,
            config=config,
            state_dict={name: _Lazy(reader, name) for name in names},
            dtype=dtype,
            attn_implementation="eager",  # the only one that it has
            **placed,
        )
    for module in model.modules():
        if type(module).__name__ == NORM:  # float32 unless there are codes, and its matrices do not take float32 rows
            module.to(dtype)
        if compiles and type(module).__name__ == HYPER:
            module.compile()
    model.eval()
    held = [*model.parameters(), *model.buffers()]
    return Loaded(
        model=model,
        version=transformers.__version__,
        stored=stored,
        why=why,
        nbytes=sum(tensor.nbytes for tensor in held),
    )


def _require_room(needed_bytes: int, stored: Stored, devices: Sequence[torch.device]) -> None:
    """Refuse what would run out of memory half way."""
    torch.cuda.empty_cache()
    free = sum(torch.cuda.mem_get_info(device)[0] for device in devices)
    if needed_bytes > free:
        where = f"held as {stored} beside this engine's weights; fewer layers fit"
        raise NotEnoughMemory("the model of transformers", needed_bytes, free, where)


class _Lazy:
    """A tensor that is made when it is looked at, as those of files are read: `transformers` takes either."""

    def __init__(self, reader: SyntheticReader, name: str) -> None:
        self._reader, self._name = reader, name

    def __getitem__(self, _: object) -> Tensor:
        value = self._reader.read(self._name)
        return value.view(torch.float8_e8m0fnu) if self.get_dtype() == "F8_E8M0" else value

    def get_dtype(self) -> str:
        """Return the safetensors spelling of its dtype."""
        return self._reader.dtype(self._name)

    def get_shape(self) -> list[int]:
        """Return its shape."""
        return list(self._reader.entries[self._name].shape)


def _device_map(layers: int, devices: Sequence[torch.device]) -> dict[str, str]:
    names = [str(device) for device in devices]
    first, last = names[0], names[-1]
    ends = {"model.embed_tokens": first, "model.rotary_emb": first}
    ends |= {part: last for part in ("model.norm", "model.hc_head", "lm_head")}
    return ends | {f"model.layers.{i}": names[i * len(names) // layers] for i in range(layers)}


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Load tensor by tensor and say nothing meanwhile."""
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with environ.variable("HF_DEACTIVATE_ASYNC_LOAD", "1"):  # else all tensors are there before any is merged
            yield
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()
