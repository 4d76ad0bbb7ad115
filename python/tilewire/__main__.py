"""``python -m tilewire doctor``: what tilewire can use here, and what is missing."""

import argparse
import importlib.util
import platform
import sys

from . import __version__, backends


def doctor():
    print(f"tilewire {__version__}, Python {platform.python_version()}, {platform.machine()}")
    for name in ("torch", "jax"):
        if importlib.util.find_spec(name) is None:
            print(f"  {name}: not installed (pip install 'tilewire[{name}]')")
            continue
        try:
            from importlib.metadata import version

            print(f"  {name}: {version(name)}")
        except Exception as e:  # what is installed badly is what a doctor is asked about
            print(f"  {name}: {e}")
    for kind, why_not in backends():
        print(f"  backend {kind}: {'ready' if why_not is None else why_not}")
    return 0


def main():
    p = argparse.ArgumentParser(prog="python -m tilewire", description=__doc__)
    p.add_argument("command", choices=["doctor"], help="doctor: what can be used here")
    p.parse_args()
    return doctor()


if __name__ == "__main__":
    sys.exit(main())
