"""Everything dsv4nb raises on purpose.

    Dsv4Error                     code, param, retryable
    ├── CheckpointError           a checkpoint cannot be read; nothing was loaded
    │   ├── NotACheckpoint        the folder is no dsv4 checkpoint, or of a model we do not run
    │   ├── UnsupportedModel      a relative of the model that this version does not run (V4.1)
    │   └── DamagedCheckpoint     files are missing, short or disagree with the config; lists all of them
    ├── NotEnoughMemory           the weights do not fit; nothing was read
    ├── LoadCancelled             somebody stopped a load; nothing stays loaded
    ├── EncodingError             messages cannot be rendered (also a ValueError)
    ├── ParseError                generated text breaks the format (also a ValueError)
    ├── RequestError              a request was refused before anything ran (also a ValueError)
    │   ├── PromptEmpty
    │   ├── PromptTooLong
    │   └── PromptOverCeiling
    ├── ChatBusy                  a turn of the chat is still running
    ├── ModelClosed               the handle was closed
    ├── ReplayMismatch            a replay differs from its recipe, or cannot be one
    └── EngineError               the engine failed while running a request
        ├── Overloaded            memory ran out; the same request can succeed later
        └── EngineDead            the device is lost until the model is loaded again

A message names the thing, the value met, the limit and the way out.
"""

from __future__ import annotations

from collections.abc import Sequence


class Dsv4Error(Exception):
    """Root of the tree.

    Attributes:
        code: stable name of the kind of error.
        param: the argument, field or tensor it is about, None when there is no single one.
        retryable: whether the same call can succeed later.
    """

    code = "error"
    retryable = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CheckpointError(Dsv4Error):
    """A checkpoint cannot be read; nothing was loaded."""

    code = "checkpoint"


class NotACheckpoint(CheckpointError):
    """The folder holds no checkpoint of this architecture."""

    code = "not_a_checkpoint"


class UnsupportedModel(CheckpointError):
    """A relative of the model that this version refuses by name."""

    code = "unsupported_model"


class DamagedCheckpoint(CheckpointError):
    """Files are missing or short, or tensors disagree with the config.

    Attributes:
        problems: one line per bad file or tensor, with expected and found values.
    """

    code = "damaged_checkpoint"

    def __init__(self, path: str, problems: Sequence[str]) -> None:
        listed = "\n".join(f"  - {p}" for p in problems)
        super().__init__(
            f"{path} is incomplete or damaged ({len(problems)} problem{'s' * (len(problems) != 1)}):\n{listed}\n"
            "Nothing was loaded. Fetch the files named above again."
        )
        self.problems = tuple(problems)


class NotEnoughMemory(Dsv4Error):
    """The weights do not fit into memory; nothing was read.

    Args:
        fits: options with which they would.
    """

    code = "memory"

    def __init__(
        self,
        name: str,
        needed_bytes: int,
        room_bytes: int,
        where: str = "as float32 on the CPU",
        fits: Sequence[str] = (),
    ) -> None:
        told = f" What fits: {'; or '.join(fits)}." if fits else ""
        super().__init__(
            f"{name} needs {needed_bytes / 1e9:,.1f} GB of memory, {where}; there are {room_bytes / 1e9:,.1f} GB.{told}"
            " open_checkpoint tells its facts without loading; load('toy') fits anywhere."
        )


class LoadCancelled(Dsv4Error):
    """Somebody stopped a load; nothing stays loaded."""

    code = "cancelled"
    retryable = True

    def __init__(self, name: str, done_bytes: int, total_bytes: int) -> None:
        when = f"at {100 * done_bytes // total_bytes} %" if total_bytes else "before its weights were read"
        super().__init__(f"loading {name} was cancelled {when}; nothing stays loaded. The same call starts over.")


class EncodingError(Dsv4Error, ValueError):
    """Messages cannot be rendered.

    Attributes:
        index: which message, None when it is not about one.
    """

    code = "invalid_messages"

    def __init__(self, message: str, *, index: int | None = None) -> None:
        super().__init__(message if index is None else f"message {index}: {message}", param="messages")
        self.index = index


class ParseError(Dsv4Error, ValueError):
    """Generated text breaks the chat format."""

    code = "invalid_output"


class RequestError(Dsv4Error, ValueError):
    """A request was refused before anything ran."""

    code = "invalid_request"


class PromptEmpty(RequestError):
    """The prompt has no tokens."""

    code = "empty_prompt"

    def __init__(self, param: str) -> None:
        super().__init__("the prompt is empty; pass at least one character", param=param)


class PromptTooLong(RequestError):
    """The prompt leaves no room to answer.

    Attributes:
        provided: tokens of the prompt; `maximum` those that fit.
    """

    code = "context_length"

    def __init__(self, n_prompt: int, max_seq: int, slack: int) -> None:
        super().__init__(
            f"prompt has {n_prompt} tokens; at most {max_seq - slack - 1} fit "
            f"(max_seq {max_seq} less {slack} reserved). Shorten it or load with a larger max_seq.",
            param="messages",
        )
        self.provided, self.maximum = n_prompt, max_seq - slack - 1


class PromptOverCeiling(RequestError):
    """The prompt is longer than the request itself allows.

    Attributes:
        provided: tokens of the prompt; `maximum` those that `max_prompt_tokens` allows.
    """

    code = "context_length"

    def __init__(self, n_prompt: int, most: int) -> None:
        super().__init__(
            f"prompt has {n_prompt} tokens; max_prompt_tokens allows {most}. Shorten it or raise max_prompt_tokens.",
            param="messages",
        )
        self.provided, self.maximum = n_prompt, most


class ChatBusy(Dsv4Error):
    """A turn of the chat is still running."""

    code = "chat_busy"
    retryable = True

    def __init__(self) -> None:
        super().__init__("the chat is busy; wait for the turn to end, or stop it with chat.stop()")


class ModelClosed(Dsv4Error):
    """The handle was closed; load the model again."""

    code = "model_closed"

    def __init__(self, name: str) -> None:
        super().__init__(f"the model {name!r} is closed; load it again with dsv4nb.load(...)")


class EngineError(Dsv4Error):
    """The engine failed while it ran a request."""

    code = "engine"


class DrafterFault(EngineError):
    """The drafter computes no numbers; the model itself goes on without it."""

    code = "drafter"


class Overloaded(EngineError):
    """Memory ran out while a request ran; what it held was freed."""

    code = "overloaded"
    retryable = True


class EngineDead(EngineError):
    """The device no longer answers; every later request fails the same way until the model is loaded again."""

    code = "engine_dead"


class ReplayMismatch(Dsv4Error):
    """A replay is not what its recipe says: another model, or other ids."""

    code = "replay_mismatch"
