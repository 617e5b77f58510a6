"""Public traces of real services: when requests came, how long they were, which blocks their prompts shared.

    azure-conv, azure-code   an hour of two Azure services, November 2023: times and lengths
    mooncake-conversation    an hour of Kimi's chat service: times, lengths and names of the prompts' blocks
                             of 512 tokens; equal names stand for equal tokens up to that block's end
    mooncake-synthetic       the same for prompts put together from public data sets

The course does not hold them; `fetch` downloads one, `find` says where one lies. Texts are in none of them.
"""

import csv
import datetime
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvcourse import fetch as files
from kvcourse import paths

MOONCAKE_BLOCK = 512  # tokens that one entry of hash_ids stands for, the last one of a prompt for fewer

_AZURE = "https://raw.githubusercontent.com/Azure/AzurePublicDataset/b469a113cedca53ddc3bdea71a143dc4b7d8700c"
_MOONCAKE = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/3b5a594133958449a1feaf1c9e0fc1b553e34a28"
_SPLITWISE = (
    'CC-BY 4.0; cite Patel, Choukse, Zhang, Shah, Goiri, Maleki, Bianchini, "Splitwise: Efficient Generative '
    'LLM Inference Using Phase Splitting", ISCA 2024'
)
_KIMI = (
    'Apache-2.0; cite Qin et al., "Mooncake: Trading More Storage for Less Computation: A KVCache-centric '
    'Architecture for Serving LLM Chatbot", FAST 2025'
)


class BadTrace(ValueError):
    """A line of a trace cannot be read; the message names file, line number and field."""


class Request(NamedTuple):
    """One request of a trace.

    arrival        seconds since the first request of the trace
    prompt_tokens  tokens read
    answer_tokens  tokens written
    hash_ids       names of the prompt's blocks from its front, a partial last one included; () if unknown
    """

    arrival: float
    prompt_tokens: int
    answer_tokens: int
    hash_ids: tuple = ()


@dataclass(frozen=True)
class Trace:
    """A public file: its place in a folder of traces, its address at a fixed commit, and whose it is."""

    file: str
    url: str
    sha256: str
    size: int  # bytes
    terms: str


TRACES = {
    "azure-conv": Trace(
        "azure/AzureLLMInferenceTrace_conv.csv",
        f"{_AZURE}/data/AzureLLMInferenceTrace_conv.csv",
        "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
        719_188,
        _SPLITWISE,
    ),
    "azure-code": Trace(
        "azure/AzureLLMInferenceTrace_code.csv",
        f"{_AZURE}/data/AzureLLMInferenceTrace_code.csv",
        "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
        320_117,
        _SPLITWISE,
    ),
    "mooncake-conversation": Trace(
        "mooncake/conversation_trace.jsonl",
        f"{_MOONCAKE}/FAST25-release/traces/conversation_trace.jsonl",
        "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
        3_029_533,
        _KIMI,
    ),
    "mooncake-synthetic": Trace(
        "mooncake/synthetic_trace.jsonl",
        f"{_MOONCAKE}/FAST25-release/traces/synthetic_trace.jsonl",
        "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
        1_136_313,
        _KIMI,
    ),
}


# --- where they lie ------------------------------------------------------------------------


def find(name, folder=None):
    """The path of a trace, or None where this machine does not have it.

    Looks into `folder`, or else into the one that KVCOURSE_TRACES names, then into `traces` of the class's
    folder (KVCOURSE_SHARED) and of the reader's own. The file may lie there as in `Trace.file` or directly.
    Raises ValueError for a name that is not in TRACES.
    """
    file = _known(name).file
    if folder is not None:
        folders = [Path(folder)]
    else:
        own = (paths.shared_dir(), paths.user_dir())
        folders = [paths.from_environment("KVCOURSE_TRACES"), *(f and f / "traces" for f in own)]
    places = (place for f in folders if f for place in (f / file, f / Path(file).name))
    return next((place for place in places if os.path.isfile(place)), None)


def fetch(name):
    """Download a trace into the reader's folder, unless it is there, and say whose it is; returns its path.

    Raises ValueError for an unknown name; kvcourse.fetch.DownloadFailed without a network or where other
    bytes come.
    """
    trace = _known(name)
    path = files.download(trace.url, paths.user_dir() / "traces" / trace.file, trace.sha256, trace.size)
    print(f"{name}: {trace.terms}.")
    return path


def load(name, folder=None):
    """The requests of a trace that this machine has: a list of `Request`. Looks where `find` does.

    Raises ValueError for an unknown name; kvcourse.fetch.DamagedFile where it is missing or is not the file
    whose SHA-256 is recorded here. Use load_azure or load_mooncake for files of your own.
    """
    trace, path = _known(name), find(name, folder)
    again = f'kvcourse.paging.traces.fetch("{name}") downloads it ({trace.size / 1e6:.1f} MB)'
    if path is None:
        raise files.DamagedFile(f"the trace {name} is not on this machine: {again}")
    files.verify(path, trace.sha256, f"remove it; {again}")
    return (load_azure if path.suffix == ".csv" else load_mooncake)(path)


def _known(name):
    if name not in TRACES:
        raise ValueError(f"trace {name!r} is not known: there are {', '.join(TRACES)}")
    return TRACES[name]


# --- reading them --------------------------------------------------------------------------


def load_azure(path):
    """Read a trace in Azure's form: CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens.

    TIMESTAMP is "2023-11-16 18:15:46.6805900"; other columns and blank lines are ignored. Returns a list of
    `Request` in the order of the file. Raises BadTrace, in one line, for what cannot be read, and for a
    request earlier than the one before it.
    """
    found, columns, times = [], None, _Times("TIMESTAMP", 10_000_000)
    for where, row in _csv_rows(path):
        if columns is None:
            columns = _azure_columns(where, row)
            continue
        if len(row) <= max(columns.values()):
            last = max(columns, key=columns.get)
            raise BadTrace(f"{where}: {last} is missing, there are {len(row)} fields")
        cells = {name: row[i] for name, i in columns.items()}
        arrival = times.since_first(where, _azure_time(where, cells["TIMESTAMP"]))
        counts = (_digits(where, name, cells[name]) for name in ("ContextTokens", "GeneratedTokens"))
        found.append(Request(arrival, *counts))
    return found


def _csv_rows(path):
    """(where, fields without spaces around them) of each line that is not blank."""
    with _opened(path) as file:
        rows = csv.reader(file)
        try:
            for row in rows:
                fields = [field.strip() for field in row]
                if any(fields):
                    yield f"{Path(path).name}, line {rows.line_num}", fields
        except csv.Error as error:
            raise BadTrace(f"{Path(path).name}, line {rows.line_num}: no CSV ({error})") from None


def _azure_columns(where, header):
    names = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    for name in names:
        if name not in header:
            raise BadTrace(f"{where}: no column {name}: the first line must name {', '.join(names)}")
    return {name: header.index(name) for name in names}


def _azure_time(where, text):
    """Ticks of 0.1 µs since some day: an integer, for a float cannot hold the seventh decimal of a date."""
    whole, dot, fraction = text.partition(".")
    try:
        if len(whole) != 19 or (dot and not (fraction.isascii() and fraction.isdigit())):
            raise ValueError
        time = datetime.datetime.fromisoformat(whole)
        seconds = (time - datetime.datetime(1970, 1, 1)) // datetime.timedelta(seconds=1)
    except (ValueError, TypeError):  # TypeError: a time zone
        raise BadTrace(
            f"{where}: TIMESTAMP is {text!r:.50}, it must be like 2023-11-16 18:15:46.6805900"
        ) from None
    return seconds * 10_000_000 + int(fraction.ljust(7, "0")[:7])


def _digits(where, name, text):
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise BadTrace(f"{where}: {name} is {text!r:.50}, it must be a whole number of at least 0")
    return int(text)


def load_mooncake(path):
    """Read a trace in Mooncake's form: a JSON object a line with the four fields of the example.

        {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

    timestamp is in milliseconds; other fields and blank lines are ignored. Returns a list of `Request` in the
    order of the file. Raises BadTrace, in one line, for what cannot be read, and for a request earlier than
    the one before it.
    """
    found, times = [], _Times("timestamp", 1000)
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{Path(path).name}, line {number}"
            entry = _json_object(where, line)
            arrival = times.since_first(where, _milliseconds(where, entry.get("timestamp")))
            counts = (_whole(where, name, entry.get(name)) for name in ("input_length", "output_length"))
            found.append(Request(arrival, *counts, _hash_ids(where, entry.get("hash_ids"))))
    return found


def _json_object(where, line):
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        raise BadTrace(f"{where}: {line.strip()!r:.50} is no JSON object {{timestamp, input_length, …}}")
    return entry


def _milliseconds(where, value):
    if type(value) not in (int, float) or not 0 <= value < 2**53:
        raise BadTrace(f"{where}: timestamp is {value!r:.50}, it must be a number of milliseconds")
    return value


def _whole(where, name, value):
    if type(value) is not int or value < 0:
        raise BadTrace(f"{where}: {name} is {value!r:.50}, it must be a whole number of at least 0")
    return value


def _hash_ids(where, ids):
    if not isinstance(ids, list) or not {type(i) for i in ids} <= {int}:
        raise BadTrace(f"{where}: hash_ids is {ids!r:.50}, it must be a list of whole numbers")
    return tuple(ids)


class _Times:
    """Turns a field's times, in ticks, into seconds since the first one; they must not go backwards."""

    def __init__(self, name, per_second):
        self.name, self.per_second = name, per_second
        self.first = self.last = None

    def since_first(self, where, ticks):
        if self.first is None:
            self.first = self.last = ticks
        if ticks < self.last:
            raise BadTrace(f"{where}: {self.name} is earlier than the request before: sort the file by time")
        self.last = ticks
        return (ticks - self.first) / self.per_second


def _opened(path):
    """As text. UTF-8, with or without a byte-order mark; other bytes become a sign that no field accepts."""
    return open(path, encoding="utf-8-sig", errors="replace", newline="")
