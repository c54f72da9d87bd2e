"""The sessions that test_hub_fuzz.py drives and kills. Each is a process of its own that does what Keeper does with a Hub, without
training: tiny checkpoints, one a step.

Run as a program it is a server that has all modules loaded and forks a session for each connection: the job comes as one line of
JSON, and what happens goes back as lines of JSON, the diary's events among them, the last one called `end`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from colabtrain.config import RunConfig
from colabtrain.hub_token import HubError
from colabtrain.runtime import hub_process, manifest, publisher, remote, resume
from colabtrain.runtime.diary import DIARY_FILE, Diary
from colabtrain.runtime.hub_access import HubAccess
from colabtrain.runtime.remote import Remote

QUICK = str(Path(__file__).parent / "hub_quick")
KEEP_LOCAL = 2
SHORT = {  # waits that would be long ones
    publisher: {"FIRST_WAIT_SECONDS": 0.05, "MAX_WAIT_SECONDS": 0.4, "REFUSED_SECONDS": 0.2, "SLICE_SECONDS": 0.02},
    remote: {"WAIT_SECONDS": 0.05, "MAX_WAIT_SECONDS": 0.2, "OPEN_SECONDS": 3.0, "DRAIN_SECONDS": 8.0},
    hub_process: {"WAITING_SECONDS": 3.0},
}


def serve() -> None:
    """Until stdin ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while sys.stdin not in select.select([sys.stdin, server], [], [])[0]:
            connection, _ = server.accept()
            with connection:
                if os.fork() == 0:
                    server.close()
                    os._exit(_child(connection))


def _child(connection: socket.socket) -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in range(3):
        os.dup2(connection.fileno(), number)
    connection.close()
    try:
        run(json.loads(sys.stdin.readline()))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return 0


def tell(event: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


class Telling(Diary):
    """A diary that tells the driver too, and that one can wait for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._done = threading.Condition()
        self._step: float = 0

    def write(self, event: str, text: str | None = None, **fields: Any) -> None:
        super().write(event, text, **fields)
        tell(event, text=text, **fields)
        if event in ("checkpoint_published", "fenced"):
            with self._done:
                self._step = fields["step"] if event == "checkpoint_published" else float("inf")
                self._done.notify_all()

    def wait_for(self, step: int, seconds: float) -> None:
        """Until `step` is published, or can never be."""
        with self._done:
            self._done.wait_for(lambda: self._step >= step, seconds)


def run(job: dict[str, Any]) -> None:
    """One session: open, bring, claim, publish, close, as Run and Keeper do."""
    for module, values in SHORT.items():
        for name, value in values.items():
            setattr(module, name, value)
    sys.path.insert(0, QUICK)  # the Hub's process gets the path of this one
    token, folder = job["token"], Path(job["folder"])
    os.environ |= {"HF_TOKEN": token, "NOTE": f"mine is {token}", "HUB_FUZZ_MUTANT": job["mutant"]}
    # This Hub has no Xet: to find that out takes another process.
    os.environ["HF_HUB_DISABLE_XET"] = "0" if job["with_xet"] else "1"
    config = RunConfig(hub=job["repo"], keep_local=KEEP_LOCAL, hub_required=job["hub_required"], **job["config"])
    access = HubAccess(job["repo"], token, job["endpoint"], job["timeout_seconds"], job["quiet_seconds"])
    folder.mkdir(parents=True, exist_ok=True)
    side = Remote(access, folder, config)
    tell("begun", pid=os.getpid(), writer=side._writer)
    try:
        side.open(identity=lambda: {"seed": job["seed"]})
        train(side, Telling(folder), folder / "checkpoints", job)
    except (HubError, ValueError) as error:
        side.end()
        tell("end", refused=f"{type(error).__name__}: {error}")
    else:
        side.close()
        tell("end", published_step=side.published_step)


def train(side: Remote, diary: Telling, checkpoints: Path, job: dict[str, Any]) -> None:
    held: list[Path] = []

    @contextlib.contextmanager
    def hold(path: Path) -> Iterator[None]:
        held.append(path)
        try:
            yield
        finally:
            held.remove(path)

    while True:
        manifest.clear_staging(checkpoints)
        side.bring(checkpoints, diary)
        found = next(iter(resume.find(checkpoints, diary)), None)
        if side.claim(diary, hold):
            break
    step = manifest.number(found) if found else 0
    tell("going_on", step=step, digest=digest(found) if found else "")
    if found:
        side.offer_left_over(found, step)
    for patience_seconds in job["patience_seconds"]:
        step += 1
        path = save(checkpoints, step, job, diary)
        tell("offered", step=step, digest=digest(path))
        side.offer(path, step, time.time())
        manifest.prune(path, KEEP_LOCAL, held)
        diary.wait_for(step, patience_seconds)


def save(checkpoints: Path, step: int, job: dict[str, Any], diary: Diary) -> Path:
    """A small checkpoint that no other session makes."""
    staging, path = checkpoints / f"{manifest.STAGING}{step}", checkpoints / f"{manifest.PREFIX}{step:08d}"
    staging.mkdir(parents=True)
    draw = random.Random(f"{job['seed']} {job['name']} {step}")
    for name in manifest.TENSOR_FILES:
        data = draw.randbytes(draw.randrange(500, 6000))
        header = json.dumps({"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
        (staging / name).write_bytes(struct.pack("<Q", len(header)) + header + data)
    state = {"format": 1, "step": step, "session": job["name"], "num_steps": 1000, "fingerprint": {"seed": job["seed"]}}
    (staging / manifest.STATE).write_text(json.dumps(state))
    (staging / DIARY_FILE).write_bytes(diary.path.read_bytes()[: diary.size()])
    manifest.write(staging)
    os.rename(staging, path)
    return path


def digest(path: Path) -> str:
    """Of every byte of a checkpoint folder."""
    whole = hashlib.sha256()
    for file in sorted(path.iterdir()):
        whole.update(f"{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
    return whole.hexdigest()


if __name__ == "__main__":
    serve()
