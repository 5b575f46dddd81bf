"""`python -m dsv4nb.kernelspec install`: the kernel for a checkout; an installed wheel brings it along."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NAME = "dsv4nb"
FILES = ("kernel.json", "logo-svg.svg", "logo-32x32.png", "logo-64x64.png")

_HERE = Path(__file__).parent
_CHECKOUT = _HERE.parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = _parser().parse_args(arguments)
    try:
        folder = install(user=args.user, prefix=sys.prefix if args.sys_prefix else args.prefix)
    except ImportError:
        sys.stderr.write("jupyter_client is not installed; pip install 'dsv4nb[jupyter]'\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"the kernel cannot be written: {error}; --user or --prefix DIR takes another place\n")
        return 1
    sys.stdout.write(f"{spec()['display_name']}: {folder}\n")
    return 0


def install(*, user: bool = False, prefix: str | None = None) -> Path:
    """Write the kernel where Jupyter finds it, and return the folder; one of the same name is replaced.

    It starts this interpreter, and finds dsv4nb where this one does.

    Args:
        user: for this person, instead of the whole machine.
        prefix: an environment's folder, instead of both.

    Raises:
        ImportError: jupyter_client is not installed.
        OSError: the place cannot be written to.
    """
    from jupyter_client.kernelspec import KernelSpecManager

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, NAME)
        folder.mkdir()
        for file in FILES[1:]:
            shutil.copyfile(_HERE / file, folder / file)
        (folder / FILES[0]).write_text(
            json.dumps(for_this_python(spec(), is_installed=_is_installed()), indent=1), encoding="utf-8"
        )
        manager = KernelSpecManager()
        return Path(manager.install_kernel_spec(str(folder), NAME, user=user, prefix=prefix))


def spec() -> dict[str, Any]:
    """Return the kernel as the wheel brings it: it starts the interpreter of the Jupyter that lists it."""
    loaded: dict[str, Any] = json.loads((_HERE / FILES[0]).read_text(encoding="utf-8"))
    return loaded


def for_this_python(kernel: Mapping[str, Any], *, is_installed: bool) -> dict[str, Any]:
    """Return the kernel for this interpreter.

    Args:
        is_installed: whether it finds this package by itself; otherwise the checkout is put in its path.
    """
    here = {**kernel, "argv": [sys.executable, *kernel["argv"][1:]]}
    if not is_installed:
        # Jupyter puts the variable's value in, so that what a person has there stays
        folders = [str(_CHECKOUT), str(_CHECKOUT / "kernels"), "${PYTHONPATH}"]
        here["env"] = {"PYTHONPATH": os.pathsep.join(folders)}
    return here


def _is_installed() -> bool:
    """Whether an interpreter finds this package without the folder and the PYTHONPATH of this one."""
    code = "import dsv4nb, dsv4nb_kernels; print(dsv4nb.__file__)"
    told = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    return told.returncode == 0 and Path(told.stdout.strip()).parent == _HERE.parent


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dsv4nb.kernelspec", description="The Jupyter kernel of dsv4nb.")
    commands = parser.add_subparsers(dest="command", required=True)
    of_install = commands.add_parser("install", help="write the kernel where Jupyter finds it")
    place = of_install.add_mutually_exclusive_group(required=True)
    place.add_argument("--user", action="store_true", help="for this person")
    place.add_argument("--prefix", metavar="DIR", help="for the environment in this folder")
    place.add_argument("--sys-prefix", action="store_true", help="for the environment of this interpreter")
    return parser
