"""Kill -9 of a process that saves, at random moments; the file must be whole each time.

    python tests/session/kill_save.py --tries 100 --seed 0

A process saves version after version of a chat over the same file and says which one is saved. It is killed in the
middle, and what lies there must be the last version that was said to be saved, or the next one, every byte of it.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from dsv4nb.session.archive import Archive, read_archive, write_archive

MIB = 1 << 20
TEMPORARY = ".dsv4nb-*.tmp"


def chat(version: int, mib: int) -> Archive:
    """Return a chat in which everything tells its version."""
    texts = dict.fromkeys(("kind", "model", "weights", "arithmetic", "encoding", "layout"), f"text {version}")
    arrays = {f"layers.{i}": np.full(mib * MIB // 4, version % 251, np.uint8) for i in range(4)}
    return Archive(manifest={**texts, "turn": version}, arrays=arrays)


def version_of(path: Path) -> int:
    """Return which version a file holds.

    Raises:
        ArchiveError: it is not whole.
        AssertionError: it holds parts of several.
    """
    archive = read_archive(path)
    version: int = archive.manifest["turn"]
    assert archive.manifest["kind"] == f"text {version}"
    assert all((array == version % 251).all() for array in archive.arrays.values()), f"{path} is mixed"
    return version


def save_for_ever(path: Path, mib: int) -> None:
    """Save version after version, and say so."""
    version = version_of(path)
    while True:
        version += 1
        following = chat(version, mib)
        print("saving", flush=True)
        write_archive(path, following)
        print(version, flush=True)


def kill_one(path: Path, mib: int, draw: random.Random) -> str:
    """Start a process, kill it in the middle of a save, check the file; return where it was killed."""
    command = [sys.executable, __file__, "--saver", str(path), "--mib", str(mib)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            seconds = 0.0
            for _ in range(draw.randint(1, 3)):
                assert process.stdout.readline() == "saving\n"
                start = time.perf_counter()
                saved = int(process.stdout.readline())
                seconds = max(seconds, time.perf_counter() - start)
            assert process.stdout.readline() == "saving\n"
            time.sleep(draw.uniform(0, 1.2 * seconds))
        finally:
            process.kill()
        rest = process.stdout.read().split()  # what it said between the last look and its end
    saved = max([saved, *(int(word) for word in rest if word.isdigit())])
    found = version_of(path)
    litter = list(path.parent.glob(TEMPORARY))
    sizes = [file.stat().st_size for file in litter]
    for file in litter:
        file.unlink()
    assert found in (saved, saved + 1), f"{saved} was saved, {found} is there"
    assert len(litter) <= 1
    if found == saved + 1:
        return "after the rename"
    if not litter:
        return "before or between"
    return "while writing" if sizes[0] < path.stat().st_size else "before the rename"


def kill(tries: int, seed: int, mib: int, folder: Path) -> Counter[str]:
    """Kill `tries` saves and return how many were killed where.

    Raises:
        AssertionError, ArchiveError: a file is not as it must be.
    """
    draw = random.Random(seed)
    path = folder / "chat.dsv4"
    write_archive(path, chat(0, mib))
    return Counter(kill_one(path, mib, draw) for _ in range(tries))


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill processes that save.")
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mib", type=int, default=16, help="size of the chat")
    parser.add_argument("--saver", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.saver is not None:
        save_for_ever(arguments.saver, arguments.mib)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        counts = kill(arguments.tries, arguments.seed, arguments.mib, Path(folder))
    for where, n in sorted(counts.items()):
        print(f"killed {where:<20}{n:>5}")
    print(f"{sum(counts.values())} of {arguments.tries} files whole, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
