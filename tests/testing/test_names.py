from __future__ import annotations

import subprocess
import sys

import pytest

from dsv4nb import testing


@pytest.mark.parametrize("name", testing.__all__)
def test_a_name_is_what_it_stands_for_though_a_module_may_be_called_the_same(name: str) -> None:
    asked = f"import types; from dsv4nb.testing import {name} as it; assert not isinstance(it, types.ModuleType), it"
    if name in ("fake_model", "record"):
        subprocess.run([sys.executable, "-c", asked], check=True)
    assert callable(getattr(testing, name))
