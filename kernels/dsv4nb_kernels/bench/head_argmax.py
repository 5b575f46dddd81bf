"""The head of V4-Flash with its best, whole and by half: in one product, and with the best found apart; the panel."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl

from dsv4nb_kernels import _best, bf16_rows, head_argmax
from dsv4nb_kernels._best import NOTHING, Best, Scored, candidates
from dsv4nb_kernels._launch import columns, compiler_options
from dsv4nb_kernels._turns import take_turn
from dsv4nb_kernels.bench import bf16_rows as rows_bench
from dsv4nb_kernels.bench._driver import Arm, Launch, require_close
from dsv4nb_kernels.head_argmax import Panel, Parts, Tuning
from dsv4nb_kernels.reference import head_argmax as twin

OP = "head_argmax"
K = 4096
SHAPES = {"head half": 64640, "head": 129280}
ROWS = (1, 2, 4, 6)
SWEPT_ROWS = (1, 6)
CUTS = [
    Tuning(rows=rows, step=128, stages=stages, warps=warps, fresh=fresh)
    for rows, stages, warps in ((64, 4, 4), (64, 5, 4), (64, 3, 4), (128, 3, 8))
    for fresh in (True, False)
]
BLOCK = 4096  # logits of a program that finds the best apart
PANEL_K = 20
PANEL_SHAPE = "panel half"
FEW = 16  # copies: the logits have just been written when they are read
LIMIT, ONE_SUM_LIMIT = 1e-6, 2e-5


def arms(device: torch.device) -> list[Arm]:
    """Return the product's cut on every shape and T, the other cuts and forms at T = 1 and 6, and the panel."""
    found = [arm for name, n in SHAPES.items() for rows in ROWS for arm in _own(device, name, n, rows)]
    return [*found, *(_panel(device, rows) for rows in ROWS)]


def _own(device: torch.device, name: str, n: int, rows: int) -> Iterator[Arm]:
    def arm(cut: Tuning, dependent: bool = True) -> Arm:
        return Arm(
            op=OP,
            shape=name,
            rows=rows,
            name=str(cut) + ("" if dependent else ", not dependent"),
            bytes_read=2 * n * K,
            make=partial(_make, device, n, rows, cut, dependent),
            compile=partial(_compile, n, cut, dependent),
            check=partial(_check, device, n, rows, cut),
            is_product=cut == head_argmax.TUNING and dependent,
        )

    yield arm(head_argmax.TUNING)
    if rows not in SWEPT_ROWS:
        return
    yield arm(head_argmax.TUNING, dependent=False)
    yield from (arm(cut) for cut in CUTS if cut != head_argmax.TUNING)
    for lanes in (True, False):
        yield Arm(
            op=OP,
            shape=name,
            rows=rows,
            name=("bf16_rows" if lanes else "the product") + ", then the best of the logits",
            bytes_read=2 * n * K,
            make=partial(_make_apart, device, n, rows, lanes),
            compile=partial(_compile_apart, n, rows, lanes),
        )


def _compile(n: int, cut: Tuning, dependent: bool) -> None:
    f32, bf16, i64 = torch.float32, torch.bfloat16, torch.int64
    head_argmax._head_kernel.warmup(
        bf16, bf16, f32, i64, f32, 1, 0, grid=(1,),
        **head_argmax.constants(n, K, cut, dependent), **head_argmax.options(cut, dependent),
    )  # fmt: skip
    _compile_best(n // cut.rows, dependent)


def _compile_best(parts: int, dependent: bool) -> None:
    _best._best_kernel.warmup(
        torch.int64, torch.float32, torch.int32, grid=(1,), num_warps=_best.WARPS, launch_pdl=dependent,
        **_best.constants(parts, dependent),
    )  # fmt: skip


def _make(device: torch.device, n: int, rows: int, cut: Tuning, dependent: bool, count: int) -> Launch:
    weights, x = rows_bench._weights(device, n, K, count), rows_bench._rows(device, rows, K)
    out, parts = Scored.empty(rows, n, device), Parts.empty(rows, n, device, cut)
    return lambda i: head_argmax.launch(x, weights[i % count], 0, cut, parts=parts, out=out, dependent=dependent)


def _check(device: torch.device, n: int, rows: int, cut: Tuning) -> None:
    weight, x = rows_bench._weights(device, n, K, 1)[0], rows_bench._rows(device, rows, K)
    logits, best = head_argmax.launch(x, weight, 5, cut)
    require_close(logits, x.double() @ weight.double().t(), LIMIT if cut.fresh else ONE_SUM_LIMIT)
    values, ids = twin.best(logits, 5)
    assert torch.equal(best.values, values) and torch.equal(best.ids.long(), ids), "another best than the twin's"


@triton.jit
def _logits_kernel(logits_ptr, parts_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    i_row, i_block = tl.program_id(0), tl.program_id(1)
    o_n = i_block * BLOCK + tl.arange(0, BLOCK)
    take_turn(True, True)
    b_logit = tl.load(logits_ptr + i_row * N + o_n, mask=o_n < N, other=0.0)
    best = tl.max(tl.where(o_n < N, candidates(b_logit, o_n), NOTHING), axis=0)
    tl.store(parts_ptr + i_row * tl.num_programs(1) + i_block, best)


def _compile_apart(n: int, rows: int, lanes: bool) -> None:
    if lanes:
        cut = bf16_rows.tuning(n, K)
        rows_bench._compile(n, K, cut, columns(rows), True)
        assert compiler_options(cut, True)
    _logits_kernel.warmup(torch.float32, torch.int64, N=n, BLOCK=BLOCK, grid=(1,), num_warps=8, launch_pdl=True)
    _compile_best(triton.cdiv(n, BLOCK), True)


def _make_apart(device: torch.device, n: int, rows: int, lanes: bool, count: int) -> Launch:
    """The best of the logits, found by two kernels behind the product."""
    x, cut = rows_bench._rows(device, rows, K), head_argmax.TUNING
    out, best = torch.empty(1, rows, n, device=device), Best.empty(rows, device)
    parts = torch.empty(rows, triton.cdiv(n, BLOCK), dtype=torch.int64, device=device)
    own = Parts.empty(rows, n, device)
    matrices, weights = rows_bench._matrices(device, n, K, count), rows_bench._weights(device, n, K, count)

    def product(i: int) -> None:
        if lanes:
            bf16_rows.bf16_rows(x, matrices[i % count], out=out, dependent=True)
        else:
            head_argmax._head_kernel[(n // cut.rows,)](
                x, weights[i % count], out, *own, rows, 0,
                **head_argmax.constants(n, K, cut), **head_argmax.options(cut, True),
            )  # fmt: skip

    def launch(i: int) -> None:
        product(i)
        _logits_kernel[(rows, parts.shape[1])](out, parts, N=n, BLOCK=BLOCK, num_warps=8, launch_pdl=True)
        _best.find_best(parts, best, True)

    return launch


def _panel(device: torch.device, rows: int) -> Arm:
    n = SHAPES["head half"]
    return Arm(
        op=OP,
        shape=PANEL_SHAPE,
        rows=rows,
        name="of the best parts",
        bytes_read=rows * n // head_argmax.TUNING.rows * 12,
        make=partial(_make_panel, device, n, rows),
        compile=partial(_compile_panel, n),
        check=partial(_check_panel, device, n, rows),
        is_product=True,
        copies=FEW,
    )


def _compile_panel(n: int) -> None:
    f32 = torch.float32
    head_argmax._panel_kernel.warmup(
        f32, torch.int64, f32, f32, torch.int32, f32, 0, grid=(1,), num_warps=head_argmax.PANEL_WARPS, launch_pdl=True,
        **head_argmax.panel_constants(n, PANEL_K, head_argmax.TUNING),
    )  # fmt: skip


def _draw_head(device: torch.device, n: int, rows: int, seed: int) -> tuple[Scored, Parts]:
    """Logits of a narrow product, which are as good as any."""
    generator = torch.Generator(device).manual_seed(seed)
    weight = torch.randn(n, 128, device=device, generator=generator).bfloat16()
    parts, x = Parts.empty(rows, n, device), torch.randn(rows, 128, device=device, generator=generator).bfloat16()
    return head_argmax.head_argmax(x, weight, parts=parts), parts


def _make_panel(device: torch.device, n: int, rows: int, count: int) -> Launch:
    heads, out = [_draw_head(device, n, rows, seed) for seed in range(count)], Panel.empty(rows, PANEL_K, device)

    def launch(i: int) -> Panel:
        head, parts = heads[i % count]
        return head_argmax.panel(head.logits, parts, PANEL_K, out=out, dependent=True)

    return launch


def _check_panel(device: torch.device, n: int, rows: int) -> None:
    head, parts = _draw_head(device, n, rows, 0)
    shown, exact = head_argmax.panel(head.logits, parts, PANEL_K), twin.panel(head.logits.double(), PANEL_K)
    assert torch.equal(shown.ids.long(), exact.ids), "other ids than the twin's"
    require_close(shown.log_sums[:, None], exact.log_sums[:, None], LIMIT)
