"""From what a person has (files, lists, a dict of either) to checked Records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from colabtrain.records.schema import Record, to_record


def load_records(source: Any) -> list[Record]:
    """Records from a path (JSONL), a list of paths or of records, or a mapping name -> any of these.

    A mapping's name is the task of records that name none. Raises ValueError naming file, line, record and field;
    FileNotFoundError for a missing file.
    """
    records = list(_read(source, None, "data"))
    if not records:
        names = ", ".join(map(str, source)) if isinstance(source, (list, tuple)) else str(source)
        raise ValueError(f"data {names[:200]!r} holds no records; give at least one")
    return records


def _read(source: Any, task: str | None, where: str) -> Iterator[Record]:
    if isinstance(source, (str, Path)):
        yield from _read_jsonl(Path(source), task)
    elif isinstance(source, Mapping) and "qs" not in source:
        for name, part in cast(Mapping[str, Any], source).items():
            yield from _read(part, str(name), f"data[{name!r}]")
    elif isinstance(source, Sequence):
        for index, item in enumerate(cast(Sequence[Any], source)):
            if isinstance(item, (str, Path)):
                yield from _read_jsonl(Path(item), task)
            elif isinstance(item, Mapping) or all(hasattr(item, name) for name in Record.__slots__):
                yield to_record(cast("Mapping[str, Any] | Record", item), f"{where}[{index}]", task or "data")
            else:
                raise ValueError(f"{where}[{index}] is a {type(item).__name__}; give a record (mapping or Record) or a path")
    else:
        raise ValueError(f"{where} is a {type(source).__name__}; give a path, a list of records, or a mapping name -> either")


def _read_jsonl(path: Path, task: str | None) -> Iterator[Record]:
    if path.is_dir() or not path.exists():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"data file {str(path)!r} {what} (the working directory is {str(Path.cwd())!r}); give a .jsonl file")
    task = path.name.split(".")[0] if task is None else task
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield to_record(_parse(line, f"{path.name} line {number}"), f"{path.name} line {number}", task)


def _parse(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        raw = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text ({error.reason} at its byte {error.start}); save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        what = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        raise ValueError(f"{where} is not JSON ({what}); one record a line is wanted, on one line of its own") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} cannot be read ({error}); a record is a small JSON object") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{where} is a JSON {type(raw).__name__}; a record is a JSON object, one a line")
    return cast(Mapping[str, Any], raw)
