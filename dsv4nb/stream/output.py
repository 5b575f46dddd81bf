"""One output of a cell, shown at once and replaced later; from any thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Output:
    """Shows a MIME bundle below the running cell.

    Outside IPython it shows nothing.
    """

    def __init__(self, bundle: Mapping[str, Any]) -> None:
        from IPython.core.getipython import get_ipython
        from IPython.display import display

        self._handle = None
        if get_ipython() is not None:
            self._handle = display(dict(bundle), raw=True, display_id=True)  # type: ignore[no-untyped-call]

    def update(self, bundle: Mapping[str, Any]) -> None:
        """Show `bundle` in the place of what is shown."""
        if self._handle is not None:
            self._handle.update(dict(bundle), raw=True)
