"""From what a person has (files, lists, a dict of either) to checked Records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from colabtrain.records.schema import Record, to_record

HELD_OUT_NAMES = ("test", "val", "validation", "calibration")  # of splits; as the name of a task, a slip


def load_records(source: Any) -> list[Record]:
    """Records from a path (JSONL), a list of paths or of records, or a mapping name -> any of these.

    A mapping's name is the task of records that name none. Raises ValueError naming file, line, record and field;
    FileNotFoundError for a missing file.
    """
    records = list(_read(source, None, "data"))
    if not records:
        raise ValueError(f"data={repr(source)[:200]} holds no records; give at least one")
    return records


def _read(source: Any, task: str | None, where: str) -> Iterator[Record]:
    if isinstance(source, (str, Path)):
        yield from _read_jsonl(source, task, where)
    elif isinstance(source, Mapping) and not {"qs", "state"} & set(source):
        for name, part in cast(Mapping[str, Any], source).items():
            yield from _checked_split(_read(part, str(name), f"data[{name!r}]"), str(name))
    elif isinstance(source, (Mapping, Record)):
        raise ValueError(f"{where} is a {type(source).__name__} that is one record; give a list of them, such as data=[record]")
    elif isinstance(source, Sequence) and not isinstance(source, (bytes, bytearray)):
        for index, item in enumerate(cast(Sequence[Any], source)):
            if isinstance(item, (str, Path)):
                yield from _read_jsonl(item, task, where)
            elif isinstance(item, Mapping) or all(hasattr(item, name) for name in Record.__slots__):
                yield to_record(cast("Mapping[str, Any] | Record", item), f"{where}[{index}]", task or "data")
            else:
                raise ValueError(f"{where}[{index}] is a {type(item).__name__}; give a record (mapping or Record) or a path")
    else:
        raise ValueError(f"{where} is a {type(source).__name__}; give a path, a list of records, or a mapping name -> either")


def _checked_split(records: Iterator[Record], name: str) -> Iterator[Record]:
    for record in records:
        if name in HELD_OUT_NAMES and record.split == "train":
            raise ValueError(
                f"data[{name!r}] holds record {record.id!r} of split 'train' (what a record is that does not say); the names of a mapping "
                f"are tasks: write split={name!r} into its records to have them held out, or give the task another name"
            )
        yield record


def _read_jsonl(source: str | Path, task: str | None, where: str) -> Iterator[Record]:
    path = Path(source).expanduser()
    if what := _no_file(path) if str(source).strip() else "has no name":
        raise FileNotFoundError(
            f"{where} file {str(source)[:200]!r} {what} (the working directory is {str(Path.cwd())!r}); give the path of a .jsonl file"
        )
    task = path.name.split(".")[0] if task is None else task
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield to_record(_parse(line, f"{path.name} line {number}"), f"{path.name} line {number}", task)


def _no_file(path: Path) -> str:
    try:
        return "is a folder" if path.is_dir() else "" if path.exists() else "does not exist"
    except OSError as error:  # a text instead of its path
        return f"cannot be opened: {error.strerror}"


def _parse(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        raw = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8 text ({error.reason} at its byte {error.start}); give JSONL saved as UTF-8, not compressed"
        ) from None
    except json.JSONDecodeError as error:
        what = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        raise ValueError(f"{where} is not JSON ({what}); one record a line is wanted, on one line of its own") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} cannot be read ({error}); a record is a small JSON object") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{where} is a JSON {type(raw).__name__}; a record is a JSON object, one a line")
    return cast(Mapping[str, Any], raw)
