"""What tests of several packages start from."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

# small operations gain nothing by a second thread, and on a busy machine the two wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")

from dsv4nb.checkpoint.opening import Checkpoint, open_checkpoint

DATA = Path(__file__).parent / "data"


def pytest_collection_finish() -> None:
    """Leave what was imported out of all later garbage collections, which many tests ask for."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def goldens_dspark() -> Path:
    return DATA / "goldens_dspark"


@pytest.fixture(scope="session")
def dspark_checkpoint(goldens_dspark: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The frozen drafter beside the trunk of `goldens`, which is kept once."""
    folder = tmp_path_factory.mktemp("dspark")
    for file in (DATA / "goldens" / "checkpoint" / "model.safetensors", *(goldens_dspark / "checkpoint").iterdir()):
        (folder / file.name).symlink_to(file)
    return open_checkpoint(folder, require_tokenizer=False)
