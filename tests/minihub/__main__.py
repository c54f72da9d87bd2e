"""`python tests/minihub`: a hub in a process of its own. It prints its URL and stays until it is sent SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from minihub import MiniHub
    from minihub.hub import TOKENS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", help="folder of its LFS objects (default: a temporary one)")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token", action="append", metavar="TOKEN=ROLE", help=f"default: {TOKENS}")
    parser.add_argument("--multipart-chunk", type=int, metavar="BYTES")
    parser.add_argument("--xet-cas", metavar="local:///FOLDER")
    parser.add_argument("--cdn-redirect", action="store_true")
    parser.add_argument("--throttle", type=float, metavar="BYTES_PER_SECOND")
    given = vars(parser.parse_args())
    listed = given.pop("token")
    tokens = dict(text.split("=", 1) for text in listed) if listed else TOKENS
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before any thread, so that only sigwait takes them
    with MiniHub(tokens=tokens, **given) as hub:
        print(hub.url, flush=True)
        signal.sigwait(ends)


if __name__ == "__main__":
    main()
