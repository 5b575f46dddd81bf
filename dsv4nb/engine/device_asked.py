"""What a `DeviceEngine` may be asked for, pure."""

from __future__ import annotations

from dataclasses import replace

from dsv4nb.contract import CONTRACTS, Contract
from dsv4nb.engine.prefill import FAST_ROWS_MAX, FEWEST_ROWS, FORMS
from dsv4nb.errors import EngineError


def bf16_contract(contract: Contract) -> Contract:
    """Return the contract that kernels keep where `contract` is asked for: the same roundings, bfloat16 between them.

    Raises:
        EngineError: it leaves the inputs of FP8 products unrounded.
    """
    if not contract.act_fp8:
        raise EngineError(
            f"the contract {contract.name!r} does not round the inputs of FP8 products; the kernels do. devices='cpu'"
            " runs it, or leave contract= out",
            param="contract",
        )
    if contract.activations == "bfloat16":
        return contract
    wanted = replace(contract, activations="bfloat16")
    for named in CONTRACTS.values():
        if replace(named, name=contract.name) == wanted:
            return named
    return replace(wanted, name=f"{contract.name}_bf16")


def require_prefill(prefill: str, chunk_rows: int) -> None:
    """Refuse a way of reading prompts that there is not.

    Raises:
        EngineError: the form has another name, or a chunk another number of rows.
    """
    if prefill not in FORMS:
        raise EngineError(f"prefill is {prefill!r}; it must be one of {', '.join(FORMS)}", param="prefill")
    if not FEWEST_ROWS <= chunk_rows <= FAST_ROWS_MAX:
        raise EngineError(
            f"a chunk of {chunk_rows} rows; it must have from {FEWEST_ROWS} to {FAST_ROWS_MAX}", param="prefill_rows"
        )
