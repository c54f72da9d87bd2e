"""What an error of the disk means, whether there is room, and which run folders are only mounted."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from colabtrain.runtime.disk import check_room, explain, mount_warning

FOLDER = Path("/content/drive/MyDrive/my {run}")


# What an error means


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, ("too full", "make room on it")),
        (errno.EDQUOT, ("quota", "is used up", "make room on it")),
        (errno.EROFS, ("read-only", "make it writable")),
        (errno.ENOTCONN, ("has dropped out", "mount it again")),
        (errno.ESTALE, ("has dropped out", "mount it again")),
        (errno.ENODEV, ("has dropped out", "mount it again")),
        (errno.ETIMEDOUT, ("does not answer", "mount it again if it stays so")),
        (errno.EHOSTDOWN, ("does not answer", "mount it again if it stays so")),
        (errno.EIO, ("fails", "check it")),
        (errno.EACCES, ("nothing may be written", "allow it")),
        (errno.EPERM, ("nothing may be written", "allow it")),
        (errno.ENOENT, ("[Errno 2]", "'lost.json'")),
        (errno.EXDEV, ("'lost.json'",)),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else None,
)
def test_an_error_is_explained_with_its_folder_and_the_systems_text(number: int, words: tuple[str, ...]) -> None:
    told = explain(OSError(number, os.strerror(number), "lost.json"), FOLDER)
    assert "\n" not in told
    for word in (*words, repr(str(FOLDER)), os.strerror(number)):
        assert word in told
    others = ("too full", "quota", "read-only", "has dropped out", "does not answer", "fails", "nothing may be written")
    rest = told.replace(os.strerror(number), "")
    assert [other for other in others if other in rest] == [word for word in words if word in others], "it claims one thing only"


def test_a_full_disk_that_comes_without_its_number_is_explained_too() -> None:
    """safetensors' own error has only a text, here as the run's checkpoints pass it on."""
    text = "step-00000007: Error while serializing: I/O error: No space left on device (os error 28)"
    assert explain(OSError(text), FOLDER) == f"the disk that holds {str(FOLDER)!r} is too full ({text}); make room on it"
    assert explain(OSError("of 28 things (os error none)"), FOLDER) == f"{str(FOLDER)!r}: of 28 things (os error none)"
    assert explain(OSError(), FOLDER) == f"{str(FOLDER)!r}: OSError"


def test_the_text_of_safetensors_has_the_number(tmp_path: Path) -> None:
    """A new version that words it otherwise must be noticed here."""
    with pytest.raises(Exception, match=r"\(os error \d+\)"):
        save_file({"weight": torch.zeros(1)}, tmp_path / "no such folder" / "file")


# Room


def disk_of(monkeypatch: pytest.MonkeyPatch, free: int, total: int = 10**12) -> list[Path]:
    """Every folder's file system has `free` of `total` bytes; the list has the folders that were asked about."""
    asked: list[Path] = []

    def disk_usage(path: Path) -> tuple[int, int, int]:
        asked.append(path)
        os.stat(path)  # what is not there has no file system
        return total, total - free, free

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    return asked


@pytest.mark.parametrize(("num_bytes", "free"), [(1000, 1200), (1001, 1202), (0, 0), (10**10, 12 * 10**9)])
def test_a_fifth_more_than_is_written_must_be_free(num_bytes: int, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_of(monkeypatch, free)
    check_room(tmp_path, num_bytes)
    with pytest.raises(OSError) as caught:
        check_room(tmp_path, num_bytes + 1)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("free", "num_bytes", "words"),
    [
        (1023, 1024, "1023 bytes free, 1.20 KiB needed"),
        (3 * 2**20, 5 * 2**20, "3.00 MiB free, 6.00 MiB needed"),
        (0, 2**33, "0 bytes free, 9.60 GiB needed"),
    ],
)
def test_what_is_free_and_needed_is_said(free: int, num_bytes: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_of(monkeypatch, free)
    with pytest.raises(OSError) as caught:
        check_room(tmp_path, num_bytes)
    assert words in str(caught.value)
    told = explain(caught.value, tmp_path)
    assert told.startswith(f"the disk that holds {str(tmp_path)!r} is too full ({words}") and told.endswith("make room on it")


def test_a_folder_that_is_not_made_yet_is_on_the_disk_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    asked = disk_of(monkeypatch, 10)
    for folder in (tmp_path / "a/b", tmp_path / "file/b"):
        with pytest.raises(OSError, match="10 bytes free"):
            check_room(folder, 1000)
    assert asked == [tmp_path / "a/b", tmp_path / "a", tmp_path, tmp_path / "file/b", tmp_path / "file"]


def test_a_real_disk_is_asked(tmp_path: Path) -> None:
    total, _, free = shutil.disk_usage(tmp_path)
    check_room(tmp_path / "new", free // 3)
    with pytest.raises(OSError, match=r"free, .* needed"):
        check_room(tmp_path / "new", total)


@pytest.mark.skipif(not hasattr(os, "statvfs"), reason="this system has no statvfs")
def test_a_file_system_that_says_nothing_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = SimpleNamespace(f_frsize=4096, f_blocks=0, f_bfree=0, f_bavail=0)
    monkeypatch.setattr(os, "statvfs", lambda path: empty)
    check_room(tmp_path, 10**15)
    empty.f_blocks = 1
    with pytest.raises(OSError, match="0 bytes free"):
        check_room(tmp_path, 1)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTCONN, errno.EIO, errno.EACCES])
def test_a_file_system_that_cannot_be_asked_is_no_refusal(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent's, which could be, is another one perhaps."""

    def disk_usage(path: Path) -> tuple[int, int, int]:
        if path == tmp_path / "mounted":
            raise OSError(number, os.strerror(number))
        return 1000, 1000, 0

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    check_room(tmp_path / "mounted", 10**15)
    with pytest.raises(OSError, match="0 bytes free"):
        check_room(tmp_path, 1)


# Mounted folders

LOCAL = """\
overlay / overlay rw,relatime,lowerdir=/a:/b 0 0
proc /proc proc rw,nosuid 0 0
tmpfs /dev/shm tmpfs rw 0 0
/dev/sda1 /content ext4 rw 0 0
"""


def warned(folder: str | Path, table: str, tmp_path: Path) -> str | None:
    (tmp_path / "mounts").write_text(LOCAL + table)
    return mount_warning(Path(folder), tmp_path / "mounts")


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("/content/drive/MyDrive/run", "drive /content/drive fuse.drive rw,nosuid,nodev,relatime,user_id=0 0 0"),
        ("/content/gdrive/Shareddrives/team/run", "drive /content/gdrive fuse.drive rw 0 0"),
        ("/mnt/elsewhere/run", "drive /mnt/elsewhere fuse.drive rw 0 0"),
        ("/mnt/elsewhere/run", "drive /mnt/elsewhere fuse rw 0 0"),
        ("/content/drive/run", "something /content/drive fuse rw 0 0"),
        ("/mnt/d/MyDrive/run", "something /mnt/d fuse.something rw 0 0"),
        ("/mnt/d/Shareddrives/run", "something /mnt/d fuse rw 0 0"),
    ],
)
def test_google_drive_is_told_apart(folder: str, line: str, tmp_path: Path) -> None:
    assert warned(folder, line, tmp_path) == (
        f"{folder!r} is on Google Drive, which uploads later and by itself: what it has not uploaded is lost with the machine, and the "
        "mount can drop out; keep a copy of it elsewhere"
    )


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("server:/export", "nfs"),
        ("server:/export", "nfs4"),
        ("//server/share", "cifs"),
        ("//server/share", "smb3"),
        ("me@host:/home", "fuse.sshfs"),
        ("remote:bucket", "fuse.rclone"),
        ("my-bucket", "fuse.gcsfuse"),
        ("mountpoint-s3", "fuse"),
        ("blobfuse2", "fuse"),
    ],
)
def test_network_folders_are_said_by_their_kind(device: str, kind: str, tmp_path: Path) -> None:
    told = warned("/mnt/net/run", f"{device} /mnt/net {kind} rw 0 0\n", tmp_path)
    assert told == f"'/mnt/net/run' is on a mounted network folder ({kind}), which can drop out; keep a copy of it elsewhere"


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("/dev/sdb1", "ext4"),
        ("/dev/sdb1", "fuseblk"),  # ntfs
        ("fuse-overlayfs", "fuse.fuse-overlayfs"),
        ("overlay", "overlay"),
        ("mergerfs", "fuse.mergerfs"),
        ("lxcfs", "fuse.lxcfs"),
        ("grpcfuse", "fuse.grpcfuse"),
        ("portal", "fuse.portal"),
        ("C:", "9p"),
        ("share", "virtiofs"),
        ("tmpfs", "tmpfs"),
        ("nfsd", "nfsd"),
        ("drive", "ext4"),  # a name proves nothing
        ("sshfs", "ext4"),
        ("sshfs", "fuse.local"),
    ],
)
def test_disks_of_the_machine_get_no_warning(device: str, kind: str, tmp_path: Path) -> None:
    assert warned("/mnt/net/run", f"{device} /mnt/net {kind} rw 0 0\n", tmp_path) is None


def test_the_longest_mount_point_decides_wherever_it_stands(tmp_path: Path) -> None:
    lines = ["server:/a /mnt nfs rw 0 0\n", "/dev/sdb1 /mnt/disk ext4 rw 0 0\n"]
    for table in ("".join(lines), "".join(reversed(lines))):
        assert warned("/mnt/run", table, tmp_path)
        assert warned("/mnt/disk/run", table, tmp_path) is None
        assert warned("/mnt/disk2/run", table, tmp_path), "a longer name is no folder below"
    assert warned("/mnt", lines[0], tmp_path), "the mount point itself"


def test_of_two_at_one_point_the_later_one_decides(tmp_path: Path) -> None:
    automount, share = "systemd-1 /mnt autofs rw 0 0\n", "server:/a /mnt nfs4 rw 0 0\n"
    assert warned("/mnt/run", automount + share, tmp_path)
    assert warned("/mnt/run", share + automount, tmp_path) is None


def test_escapes_and_other_letters_of_a_mount_point_are_read(tmp_path: Path) -> None:
    table = "server:/a /mnt/our\\040tab\\011back\\134slash\u2028\u00fc nfs rw 0 0\n"
    assert warned("/mnt/our tab\tback\\slash\u2028\u00fc/run", table, tmp_path)
    assert warned("/mnt/our/run", table, tmp_path) is None


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "net/run").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "net")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    table = f"server:/a {(tmp_path / 'net').resolve()} nfs rw 0 0\n"
    told = warned(tmp_path / "link/run", table, tmp_path)
    assert told is not None and told.startswith(repr(str(tmp_path / "link/run"))), "by the name that the person gave"
    assert warned(tmp_path / "link/new/run", table, tmp_path), "a folder that is not made yet"
    assert warned(tmp_path / "circle", table, tmp_path) is None


def test_a_relative_folder_is_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net").mkdir()
    monkeypatch.chdir(tmp_path / "net")
    assert warned("run", f"server:/a {(tmp_path / 'net').resolve()} nfs rw 0 0\n", tmp_path)


def test_a_drive_that_was_never_mounted_is_told_from_one_that_is(tmp_path: Path) -> None:
    for table in ("", "/dev/sdb1 /content/drive ext4 rw 0 0\n"):
        told = warned("/content/drive/MyDrive/run", table, tmp_path)
        assert told == "'/content/drive/MyDrive/run' is on this machine's own disk and lost with it: no Google Drive is mounted there"
    assert warned("/home/me/MyDrive/run", "fuse-overlayfs / fuse.fuse-overlayfs rw 0 0\n", tmp_path) is None


@pytest.mark.parametrize("table", ["", "\n\n", "one\n", "two words\n", "server:/a  nfs rw 0 0\n", "none relative nfs rw 0 0\n"])
def test_a_table_that_says_nothing_gives_no_warning(table: str, tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text(table)
    assert mount_warning(tmp_path, tmp_path / "mounts") is None


def test_no_table_no_warning(tmp_path: Path) -> None:
    assert mount_warning(tmp_path, tmp_path / "none") is None


def test_the_real_table_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine has: an answer, no error; and it is the system's table that is asked by default."""
    asked: list[Any] = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: (asked.append(self), real(self))[1])
    told = mount_warning(tmp_path)
    assert told is None or repr(str(tmp_path)) in told
    assert asked == [Path("/proc/self/mounts")]
