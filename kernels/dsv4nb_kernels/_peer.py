"""Sums that the two GPUs of a pair push into each other's memory, and the wait for them.

A word is a float32 and above it the number of the join. It arrives whole, so that no order between words matters and
no fence stands between data and flag: a reader looks at all of its words until each has the number. Numbers count the
joins of each row's part on both GPUs alike; even and odd ones have words of their own. That is enough: a GPU pushes
join n + 2 after its take of n + 1, whose words the other pushed after its take of n.

Words are written and read with relaxed accesses of system scope. The wait is bounded: a reader that gives up leaves
NaN for what is missing and an error word, and after that no join of this GPU waits again.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4nb_kernels._launch import ROWS_MAX, require, require_tensor

CHANNELS = 256  # of a row in one program: whoever pushes or takes cuts rows alike
POLLS = 1 << 22  # looks at the words before a join gives up: seconds, see kernels/README.md
ERROR_WORDS = 4  # one is used; the others make it 16 bytes

_NAN = tl.constexpr(0x7FC00000)  # its bits: Triton compares its globals, and NaN equals nothing
_PUSH = tl.constexpr("""{
.reg .b64 w;
mov.b64 w, {$2, $3};
st.relaxed.sys.global.b64 [$1], w;
mov.b32 $0, 0;
}""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mailbox:
    """What one GPU holds for the joins with the other.

    Attributes:
        words: [2, 8, D] int64, written by the other GPU: for even and for odd joins of each row.
        counts: [8, D/256] int32, joins done.
        error: [4] int32; the first is 1 once a join has given up.
    """

    words: Tensor
    counts: Tensor
    error: Tensor

    @classmethod
    def empty(cls, width: int, device: torch.device) -> Mailbox:
        """Return room for rows of `width` columns, before the first join."""
        return cls(
            words=torch.zeros(2, ROWS_MAX, width, dtype=torch.int64, device=device),
            counts=torch.zeros(ROWS_MAX, width // CHANNELS, dtype=torch.int32, device=device),
            error=torch.zeros(ERROR_WORDS, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One GPU's end of a pair.

    Attributes:
        mine: what this GPU reads.
        theirs: what this GPU writes; it lies on the other one.
        polls: how often a join looks before it gives up.
    """

    mine: Mailbox
    theirs: Mailbox
    polls: int = POLLS

    @property
    def has_failed(self) -> bool:
        """Whether a join of this GPU has given up; waits for the GPU. Both ends are then to be made anew."""
        return bool(self.mine.error[0].item())


def connect(width: int, devices: tuple[torch.device, torch.device], *, polls: int = POLLS) -> tuple[Link, Link]:
    """Return both ends of a pair for rows of `width` columns.

    Args:
        width: D, a multiple of 256.
        devices: two GPUs that reach each other's memory; or twice the CPU, for the interpreter.

    Raises:
        ValueError: the width does not fit, or the GPUs do not reach each other's memory.
    """
    require(width > 0 and width % CHANNELS == 0, f"width must be a multiple of {CHANNELS}", width)
    first, second = devices
    if first != second:
        for one, other in ((first, second), (second, first)):
            reaches = torch.cuda.can_device_access_peer(one, other)
            require(reaches, f"{one} must reach the memory of {other}", "no peer access")
            torch.zeros(1, device=one).to(other)  # a copy between them is what makes torch open the access
    boxes = Mailbox.empty(width, first), Mailbox.empty(width, second)
    for device in {first, second} if first.type == "cuda" else ():
        torch.cuda.synchronize(device)  # zeros everywhere before anybody pushes
    return Link(mine=boxes[0], theirs=boxes[1], polls=polls), Link(mine=boxes[1], theirs=boxes[0], polls=polls)


@triton.jit
def push(p_words, b_x, number, PTX: tl.constexpr):
    """Write float32 and the number of their join into the other GPU's words."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    if PTX:
        tl.inline_asm_elementwise(
            _PUSH, "=r,l,r,r", [p_words.to(tl.int64), b_bits, number], tl.int32, is_pure=False, pack=1
        )
    else:
        tl.store(p_words, (number.to(tl.int64) << 32) | (b_bits.to(tl.int64) & 0xFFFFFFFF))


@triton.jit
def take(p_words, number, p_error, polls):
    """Wait for the words of join `number` and return their float32; NaN where one has not come."""
    b_failed = tl.load(p_error)
    left = polls
    b_words = tl.load(p_words, volatile=True)
    missing = _missing(b_words, number, b_failed)
    while (missing == 2) & (left > 0):
        b_words = tl.load(p_words, volatile=True)
        missing = _missing(b_words, number, b_failed)
        left -= 1
    tl.store(p_error, 1, mask=missing != 0)
    b_bits = tl.where((b_words >> 32).to(tl.int32) == number, b_words.to(tl.int32), _NAN)
    return b_bits.to(tl.float32, bitcast=True)


@triton.jit
def _missing(b_words, number, b_failed):
    """0: every word is there; 1: some are not, and there was an error before; 2: some are not.

    Threads may see different values of an error that another program writes just now, and must go on together: so the
    error is part of what they agree on.
    """
    b_late = ((b_words >> 32).to(tl.int32) != number).to(tl.int32)
    return tl.max(b_late * (2 - b_failed), axis=0)


def require_link(link: Link, width: int, device: torch.device) -> None:
    """Refuse an end that was made for other rows or for the other GPU.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit.
    """
    for box, name in ((link.mine, "link.mine"), (link.theirs, "link.theirs")):
        place = device if name == "link.mine" else box.words.device
        require(width % CHANNELS == 0, f"rows that are joined must have a multiple of {CHANNELS} channels", width)
        require_tensor(box.words, f"{name}.words", (2, ROWS_MAX, width), torch.int64, place)
        require_tensor(box.counts, f"{name}.counts", (ROWS_MAX, width // CHANNELS), torch.int32, place)
        require_tensor(box.error, f"{name}.error", (ERROR_WORDS,), torch.int32, place)
    require(link.polls > 0, "polls must be positive", link.polls)
