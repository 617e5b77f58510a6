"""Traces: real files where they are, small ones by hand, and a line for everything that cannot be read."""

import hashlib

import pytest

from kvcourse import fetch as files
from kvcourse.paging import traces
from kvcourse.paging.traces import BadTrace, Request, load_azure, load_mooncake

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 23:59:59.9999999,374,44\n"
    "2023-11-17 00:00:00.0000001,396,109\n"
    "2023-11-17 00:00:04,879,55\n"
)
MOONCAKE = (
    '{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 2353]}\n'
    '{"timestamp": 30535, "input_length": 512, "output_length": 0, "hash_ids": [46]}\n'
)


def written(tmp_path, text, name="t"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# --- the real ones -----------------------------------------------------------------------


def real(name):
    if traces.find(name) is None:
        pytest.skip(
            f"the trace {name} is not here: fetch it, or let KVCOURSE_TRACES name a folder that has it"
        )
    return traces.load(name)  # checks the hash


@pytest.mark.parametrize(
    "name, requests, prompts, answers, hour",
    [
        ("azure-conv", 19_366, 22_361_870, 4_088_665, 3501.721937),
        ("azure-code", 8_819, 18_059_974, 245_896, 3435.948056),
    ],
)
def test_azure_totals(name, requests, prompts, answers, hour):
    """Counted with awk, not with the loader; the hour is the difference of the last and the first time."""
    found = real(name)
    assert len(found) == requests
    assert sum(r.prompt_tokens for r in found) == prompts
    assert sum(r.answer_tokens for r in found) == answers
    assert (found[0].arrival, found[-1].arrival) == (0, pytest.approx(hour, abs=1e-6))
    assert {r.hash_ids for r in found} == {()}


@pytest.mark.parametrize(
    "name, requests, references, names, first",
    [
        ("mooncake-conversation", 12_031, 288_500, 182_790, Request(0, 6758, 500, tuple(range(14)))),
        ("mooncake-synthetic", 3_993, 121_877, 43_924, Request(0, 40_160, 6, tuple(range(79)))),
    ],
)
def test_mooncake_totals(name, requests, references, names, first):
    found = real(name)
    assert (len(found), found[0]) == (requests, first)
    assert sum(len(r.hash_ids) for r in found) == references
    assert len({i for r in found for i in r.hash_ids}) == names
    assert all(len(r.hash_ids) == -(-r.prompt_tokens // traces.MOONCAKE_BLOCK) for r in found)


# --- by hand -----------------------------------------------------------------------------


def test_azure_by_hand(tmp_path):
    found = load_azure(written(tmp_path, AZURE))
    assert [r[1:3] for r in found] == [(374, 44), (396, 109), (879, 55)]
    assert [r.arrival for r in found] == [0, 2e-7, 4.0000001]  # the seventh decimal counts


def test_mooncake_by_hand(tmp_path):
    found = load_mooncake(written(tmp_path, MOONCAKE))
    assert found == [Request(0.0, 600, 52, (46, 2353)), Request(3.053, 512, 0, (46,))]


@pytest.mark.parametrize("load, text", [(load_azure, AZURE), (load_mooncake, MOONCAKE)])
def test_forms_of_a_text_file(tmp_path, load, text):
    """Windows line ends, a byte-order mark, blank lines and a last line without an end change nothing."""
    want = load(written(tmp_path, text))
    blank = "\n" + text.replace("\n", "\n  \n")
    for other in (text.replace("\n", "\r\n"), "\ufeff" + text, text.rstrip("\n"), blank):
        assert load(written(tmp_path, other)) == want
    assert load(written(tmp_path, "")) == []


def test_other_columns_and_fields_are_ignored(tmp_path):
    shuffled = 'GeneratedTokens,Model, TIMESTAMP ,ContextTokens\n7,"a,b", 2023-11-16 18:15:46 , 3 \n'
    assert load_azure(written(tmp_path, shuffled)) == [Request(0, 3, 7)]
    more = '{"model": "x", "timestamp": 0.5, "input_length": 3, "output_length": 7, "hash_ids": []}'
    assert load_mooncake(written(tmp_path, more)) == [Request(0, 3, 7)]


BAD_AZURE = [
    ("2023-11-16 18:15:46,374", "line 6: GeneratedTokens is missing, there are 2 fields"),
    ("2023-11-18 18:15:46,,44", "line 6: ContextTokens is '', it must be a whole number of at least 0"),
    ("2023-11-18 18:15:46,374,-1", "line 6: GeneratedTokens is '-1'"),
    ("2023-11-18 18:15:46,3.5,44", "line 6: ContextTokens is '3.5'"),
    ("2023-11-18 18:15:46,３７,44", "line 6: ContextTokens is '３７'"),
    ("2023-11-18 18:15:46," + "9" * 5000 + ",44", "line 6: ContextTokens is '999"),
    ("16.11.2023 18:15:46,374,44", "line 6: TIMESTAMP is '16.11.2023 18:15:46', it must be like 2023-11-16"),
    ("2023-13-16 18:15:46,374,44", "line 6: TIMESTAMP is '2023-13-16 18:15:46'"),
    ("2023-11-18 18:15:46.12x,374,44", "line 6: TIMESTAMP is '2023-11-18 18:15:46.12x'"),
    ("2023-11-18 18:15+01:00,374,44", "line 6: TIMESTAMP is"),
    ("2023-11-16 23:59:59,374,44", "line 6: TIMESTAMP is earlier than the request before: sort the file"),
    ("2023-11-18 18:15:46,374,\x00", "line 6: "),
    (b"2023-11-18 18:15:46,\xff\xfe,44", "line 6: ContextTokens is '\ufffd\ufffd'"),
]


@pytest.mark.parametrize("line, words", BAD_AZURE, ids=range(len(BAD_AZURE)))
def test_a_bad_azure_line_is_named(tmp_path, line, words):
    line = line if isinstance(line, bytes) else line.encode()
    path = written(tmp_path, AZURE.encode() + b"\n" + line + b"\n2023-11-19 00:00:00,1,1\n", "lengths.csv")
    with pytest.raises(BadTrace) as error:
        load_azure(path)
    assert str(error.value).startswith(f"lengths.csv, {words}") and len(str(error.value).splitlines()) == 1


def test_a_header_without_a_column_is_named(tmp_path):
    for text in ("2023-11-16 18:15:46,374,44\n", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,374\n"):
        with pytest.raises(
            BadTrace, match=r"t, line 1: no column (TIMESTAMP|GeneratedTokens): the first line"
        ):
            load_azure(written(tmp_path, text))


GOOD = '"timestamp": 40000, "input_length": 512, "output_length": 9, "hash_ids": [1]'
BAD_MOONCAKE = [
    ("{" + GOOD, "is no JSON object"),
    ("[" * 100_000, "is no JSON object"),
    ("[1, 2]", "is no JSON object"),
    (
        "{" + GOOD.replace("40000", '"40000"') + "}",
        "timestamp is '40000', it must be a number of milliseconds",
    ),
    ("{" + GOOD.replace("40000", "NaN") + "}", "timestamp is nan"),
    ("{" + GOOD.replace("40000", "true") + "}", "timestamp is True"),
    ("{" + GOOD.replace("40000", "-1") + "}", "timestamp is -1"),
    ("{" + GOOD.replace("40000", "0") + "}", "timestamp is earlier than the request before"),
    ("{" + GOOD.replace("input_length", "length") + "}", "input_length is None, it must be a whole number"),
    ("{" + GOOD.replace("512", "512.0") + "}", "input_length is 512.0"),
    ("{" + GOOD.replace(": 9", ": -9") + "}", "output_length is -9"),
    ("{" + GOOD.replace("[1]", "1") + "}", "hash_ids is 1, it must be a list of whole numbers"),
    ("{" + GOOD.replace("[1]", '[1, "2"]') + "}", "hash_ids is [1, '2']"),
]


@pytest.mark.parametrize("line, words", BAD_MOONCAKE, ids=range(len(BAD_MOONCAKE)))
def test_a_bad_mooncake_line_is_named(tmp_path, line, words):
    path = written(tmp_path, MOONCAKE + "\n" + line + "\n", "ids.jsonl")
    with pytest.raises(BadTrace) as error:
        load_mooncake(path)
    message = str(error.value)
    assert message.startswith("ids.jsonl, line 4: ") and words in message
    assert len(message) < 200 and len(message.splitlines()) == 1


# --- finding and fetching ------------------------------------------------------------------


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A trace of three lines in the catalogue, and settings that find nothing but what a test puts there."""
    served = written(tmp_path, AZURE, "served.csv")
    trace = traces.Trace(
        "azure/served.csv",
        served.as_uri(),
        hashlib.sha256(AZURE.encode()).hexdigest(),
        len(AZURE),
        "CC-BY; cite X",
    )
    monkeypatch.setitem(traces.TRACES, "small", trace)
    monkeypatch.setenv("KVCOURSE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KVCOURSE_TRACES", raising=False)
    monkeypatch.delenv("KVCOURSE_SHARED", raising=False)
    return trace


def test_a_fetched_trace_is_found_and_its_terms_are_said(small, tmp_path, capsys):
    assert traces.find("small") is None
    with pytest.raises(
        files.DamagedFile, match=r'the trace small is not on this machine: .*fetch\("small"\)'
    ):
        traces.load("small")
    path = traces.fetch("small")
    assert path == traces.find("small") == tmp_path / "home" / "traces" / "azure" / "served.csv"
    assert capsys.readouterr().out == "small: CC-BY; cite X.\n"
    assert len(traces.load("small")) == 3
    path.write_text(AZURE + "2023-11-18 00:00:00,1,1\n")
    with pytest.raises(files.DamagedFile, match="is damaged: SHA-256"):
        traces.load("small")


def test_where_a_trace_is_looked_for(small, tmp_path, monkeypatch):
    places = {"KVCOURSE_SHARED": "class", "KVCOURSE_TRACES": "named"}
    for variable, folder in places.items():
        inside = tmp_path / folder / ("traces" if folder == "class" else "")
        inside.mkdir(parents=True)
        monkeypatch.setenv(variable, str(tmp_path / folder))
        assert traces.find("small") != inside / "served.csv"
        written(inside, AZURE, "served.csv")  # directly, without the folder azure/
        assert traces.find("small") == inside / "served.csv"  # the later one of `places` comes first
    assert traces.find("small", tmp_path / "elsewhere") is None
    assert traces.find("small", str(tmp_path / "class" / "traces")).name == "served.csv"


def test_a_name_that_is_not_known_is_refused():
    for call in (traces.find, traces.fetch, traces.load):
        with pytest.raises(
            ValueError, match="trace 'azure' is not known: there are azure-conv, azure-code, moon"
        ):
            call("azure")


def test_addresses_are_fixed_and_terms_cite():
    for trace in traces.TRACES.values():
        assert trace.url.startswith("https://raw.githubusercontent.com/")
        assert len(trace.url.split("/")[5]) == 40  # a commit, not a branch
        assert "; cite " in trace.terms and len(trace.sha256) == 64
