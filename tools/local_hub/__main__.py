"""Run a local Hub: on its own until Ctrl-C, or for as long as a command takes that is to use it.

    python -m tools.local_hub                       # prints what to export in another shell
    python -m tools.local_hub -- make release

The command gets HF_ENDPOINT, HF_TOKEN and an HF_HOME of its own: nothing from this Hub comes into the cache of the
real one, where a repository of the same name may lie.
"""

import argparse
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from .app import Hub
from .server import serve
from .store import Store

# What would make a client ask this Hub nothing, or share a cache with the real one.
DIVERSIONS = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "KERNELS_CACHE", "LOCAL_KERNELS")


def client_settings(endpoint: str, token: str, home: Path) -> dict[str, str]:
    """What the clients have to be told."""
    return {"HF_ENDPOINT": endpoint, "HF_TOKEN": token, "HF_HOME": str(home)}


def client_environment(settings: dict[str, str]) -> dict[str, str]:
    """This process's environment with the settings of `client_settings`."""
    return {**{name: value for name, value in os.environ.items() if name not in DIVERSIONS}, **settings}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.local_hub", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, help="where the repositories are kept (default: deleted at the end)")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument(
        "--trusted", action="append", default=[], metavar="OWNER", help="is a trusted publisher; may be repeated"
    )
    parser.add_argument("command", nargs="*", help="run this instead of waiting for Ctrl-C, and exit with its status")
    parser.epilog = "LOCAL_HUB_TOKEN is the token that writes need; a random one by default."
    args = parser.parse_args(argv)
    token = os.environ.get("LOCAL_HUB_TOKEN") or f"hf_{secrets.token_hex(16)}"
    with contextlib.ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="local-hub-")))
        hub = Hub(Store((args.store or temporary / "store").resolve()), token, args.trusted)
        try:
            endpoint = stack.enter_context(serve(hub.app(), args.port))
        except OSError as error:
            print(f"local_hub: can't listen on port {args.port}: {error}", file=sys.stderr)
            return 1
        settings = client_settings(endpoint, token, temporary / "home")
        if args.command:
            try:
                return subprocess.run(args.command, env=client_environment(settings), check=False).returncode
            except OSError as error:
                print(f"local_hub: can't run {args.command[0]}: {error}", file=sys.stderr)
                return 127
            except KeyboardInterrupt:  # the command got it too
                return 130
        for name, value in settings.items():
            print(f"export {name}={value}")
        print("# serving until Ctrl-C", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
