"""Runs `test_hosts.py` on every kernel and in every application that we promise to work with.

    python tests/lab/hosts.py                        # all of them, about two minutes
    python tests/lab/hosts.py --all                  # every browser test on each, about half an hour
    python tests/lab/hosts.py --only "ipykernel 6.31.0"

Other versions of ipykernel are installed beside the present one, into a folder that is gone afterwards.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOSTS = {
    "Notebook 7": {"DSV4NB_APP": "notebook"},
    "ipykernel 6.31.0": {"packages": "ipykernel==6.31.0 nest-asyncio", "DSV4NB_DEAF": "1"},
    # it drops messages to a subshell that has ended, ipykernel #1557: a test that lost one begins again
    "ipykernel 7.3.0": {"packages": "ipykernel==7.3.0", "reruns": "2"},
}


def passes(host: dict[str, str], folder: str, which: str) -> bool:
    """Run the tests."""
    env = dict(os.environ)
    if packages := host.get("packages"):
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", folder]
        env.pop("PIP_CONSTRAINT", None)  # it pins the present version
        subprocess.run([*command, *packages.split()], check=True, env=env)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, env.get("PYTHONPATH", "")]))
    env |= {name: value for name, value in host.items() if name.isupper()}
    tests = ["-m", "pytest", "-q", "-s", "-m", "lab", "-p", "no:cacheprovider", which]
    tests += ["--reruns", host.get("reruns", "0")]
    return subprocess.run([sys.executable, *tests], env=env, cwd=ROOT).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", choices=HOSTS, action="append", help="this one; may be given several times")
    parser.add_argument("--all", action="store_true", help="every browser test, not those of test_hosts.py alone")
    asked = parser.parse_args()
    which = "tests/lab" if asked.all else "tests/lab/test_hosts.py"
    failed = []
    for name in asked.only or HOSTS:
        print(f"== {name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            if not passes(HOSTS[name], folder, which):
                failed.append(name)
    sys.exit(f"failed on {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
