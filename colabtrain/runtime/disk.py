"""The disk under a run folder: what its errors mean for people, whether there is room, whether it is only mounted.

Nothing is claimed that is not known: a file system that does not say how much is free has room, and a kind of mount that
is not known to be a network folder gets no warning.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
from pathlib import Path

ROOM = 1.2  # times the bytes of a write must be free: to fill the disk to the brim takes the person's other files down too
MOUNTS = Path("/proc/self/mounts")  # Linux has it
COLAB_DRIVE, DRIVE_FOLDERS = "/content/drive", {("MyDrive",), ("Shareddrives",)}
NETWORK_TYPES = {"nfs", "nfs4", "cifs", "smb3", "smbfs"}
# As fuse.NAME, or as the device of a plain fuse; most others are disks of this machine.
NETWORK_FUSE = {"sshfs", "rclone", "s3fs", "mountpoint-s3", "gcsfuse", "blobfuse2", "juicefs", "glusterfs", "google-drive-ocamlfuse"}
MEANINGS = {  # what is wrong with {folder}, what the system says of it ({why}), what helps -> the error numbers that say so
    "the disk that holds {folder} is too full ({why}); make room on it": {errno.ENOSPC},
    "your quota on the disk that holds {folder} is used up ({why}); make room on it": {errno.EDQUOT},
    "the disk that holds {folder} is read-only ({why}); make it writable, or give another run folder": {errno.EROFS},
    "the mounted folder that holds {folder} has dropped out ({why}); mount it again": {
        *(errno.ENOTCONN, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ECONNABORTED, errno.ECONNRESET),
    },
    "the mounted folder that holds {folder} does not answer ({why}); mount it again if it stays so": {
        *(errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
    },
    "the disk or mounted folder that holds {folder} fails ({why}); check it, or mount it again": {errno.EIO},
    "nothing may be written in {folder} ({why}); allow it, or give another run folder": {errno.EACCES, errno.EPERM},
}


def explain(error: OSError, folder: Path) -> str:
    """What `error`, met in `folder`, means for people, and what helps."""
    number, shown = _number(error), repr(str(folder))
    text = str(error) or type(error).__name__
    for meaning, numbers in MEANINGS.items():
        if number in numbers:
            return meaning.format(folder=shown, why=error.strerror or text)
    return f"{shown}: {text}"


def _number(error: OSError) -> int | None:
    """The error number; where the error has only a text, as safetensors' on a full disk, the one in there."""
    if error.errno is not None or os.name == "nt":  # Windows' own numbers mean something else
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


def check_room(folder: Path, num_bytes: int) -> None:
    """Raise OSError (ENOSPC) where the file system of `folder` says that it has no room to spare for `num_bytes` more."""
    total, free = _total_and_free_bytes(folder)
    needed = math.ceil(ROOM * num_bytes)
    if total and free < needed:
        raise OSError(errno.ENOSPC, f"{_size(free)} free, {_size(needed)} needed with some to spare")


def _total_and_free_bytes(folder: Path) -> tuple[int, int]:
    """Of its file system; zeros where that is not known."""
    for path in (folder, *folder.parents):
        try:
            total, _, free = shutil.disk_usage(path)
        except (FileNotFoundError, NotADirectoryError):
            continue  # the folder is not made yet
        except OSError:  # a parent may be on another file system, which says nothing of this one
            break
        return total, free
    return 0, 0


def _size(num_bytes: int) -> str:
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.2f} {unit}"
    return f"{num_bytes} bytes"


def mount_warning(folder: Path, mounts: Path = MOUNTS) -> str | None:
    """What a person should know of a run folder on Google Drive or another network folder; None for one that is on a disk
    of this machine, and where the system has no table of mounts."""
    try:
        table, path = os.fsdecode(mounts.read_bytes()), folder.resolve()
    except (OSError, RuntimeError):  # RuntimeError: links in a circle
        return None
    device, point, kind = _mount(path, table)
    below = path.relative_to(point).parts[:1] if point else ()
    is_fuse, name = kind == "fuse" or kind.startswith("fuse."), kind.removeprefix("fuse.")
    if is_fuse and ("drive" in (device, name) or point == COLAB_DRIVE or below in DRIVE_FOLDERS):
        what = "on Google Drive, which uploads later and by itself: what it has not uploaded is lost with the machine, and the mount"
    elif kind in NETWORK_TYPES or (device if kind == "fuse" else name) in NETWORK_FUSE:
        what = f"on a mounted network folder ({kind}), which"
    elif path.is_relative_to("/content/drive"):
        return f"{str(folder)!r} is on this machine's own disk and lost with it: no Google Drive is mounted there"
    else:
        return None
    return f"{str(folder)!r} is {what} can drop out; keep a copy of it elsewhere"


def _mount(path: Path, table: str) -> tuple[str, str, str]:
    """Device, mount point and type of what is mounted at the longest mount point above `path`; of two at one point, the
    later one hides the earlier."""
    found, longest = ("", "", ""), 0
    for line in table.split("\n"):
        device, point, kind, *_ = *(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), part) for part in line.split(" ")), "", ""
        depth = len(Path(point).parts)
        if depth >= max(longest, 1) and path.is_relative_to(point):
            found, longest = (device, point, kind), depth
    return found
