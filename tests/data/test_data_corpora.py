"""Corpora by name: what they are and where they come from."""

import sys
import types

import pytest

from curvescope.core.errors import CurvescopeError, MissingExtra, UsageError
from curvescope.data import corpora
from curvescope.data.corpora import CORPORA, corpus_text, describe_corpus, read_source, stdlib_files

SAMPLE = "".join(f"Sentence {i} has {i % 7} words — or so.\n" for i in range(100))


@pytest.fixture
def sample(monkeypatch):
    monkeypatch.setattr(corpora, "_asset_text", lambda name: {"sample.txt": SAMPLE}[name])


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the datasets package; it notes what was asked."""
    asked = []
    rows = [{"id": 1, "title": "t", "text": "one"}, {"id": 2, "title": "u", "text": "two"}]

    def load_dataset(path, config, *, split, streaming):
        asked.append((path, config, split, streaming))
        if path == "absent":
            raise ConnectionError("no route to the hub\nwith a long trace")
        return [{"id": 3}] if path == "numbers" else rows

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return asked


@pytest.mark.usefixtures("sample")
def test_sample():
    assert corpus_text("sample") == read_source("sample") == SAMPLE
    assert describe_corpus("sample") == f"sample: {len(SAMPLE.encode())} bytes"


@pytest.mark.usefixtures("sample")
def test_max_bytes_cuts_at_a_whole_character():
    for most in range(17, 30):
        cut = corpus_text("sample", max_bytes=most)
        assert SAMPLE.startswith(cut)
        assert most - 2 <= len(cut.encode()) <= most
    assert corpus_text("sample", max_bytes=10**6) == SAMPLE


def test_a_missing_asset_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(corpora.resources, "files", lambda package: tmp_path)
    with pytest.raises(CurvescopeError, match=r"lacks the file assets/sample.txt"):
        corpus_text("sample")
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "sample.txt").write_text(SAMPLE, encoding="utf-8")
    assert corpus_text("sample") == SAMPLE


def test_stdlib_is_the_source_of_this_python():
    files = stdlib_files()
    names = [file.as_posix() for file in files]
    assert any(name.endswith("/json/decoder.py") for name in names)
    assert any(name.endswith("/bisect.py") for name in names)
    assert not any(
        part in name
        for name in names
        for part in ("/test/", "site-packages/", "/idlelib/", "/lib2to3/", "/tests/")
    )
    first = files[0].read_text(encoding="utf-8")
    assert corpus_text("python-stdlib", max_bytes=2000) == (first + "\n")[:2000]
    version = ".".join(str(number) for number in sys.version_info[:3])
    assert describe_corpus("python-stdlib") == (
        f"python-stdlib: the standard library of Python {version}, {len(files)} files"
    )


def test_stdlib_order_and_exceptions(monkeypatch, tmp_path):
    kept = {"b.py": "b", "a/z.py": "az", "a.py": "a"}
    left_out = ["a/test/x.py", "site-packages/x.py", "c.txt", "idlelib/x.py", "lib2to3/x.py", "config-3/x.py"]
    for name, content in (kept | dict.fromkeys([*left_out, "_sysconfigdata_x.py"], "no")).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9")
    monkeypatch.setattr(corpora.sysconfig, "get_path", lambda name: str(tmp_path))
    assert [f.relative_to(tmp_path).as_posix() for f in stdlib_files()] == ["a/z.py", "a.py", "b.py"]
    assert corpus_text("python-stdlib") == "az\na\nb"
    monkeypatch.setattr(corpora.sysconfig, "get_path", lambda name: str(tmp_path / "nowhere"))
    with pytest.raises(CurvescopeError, match="without the source"):
        corpus_text("python-stdlib")


def test_files_and_folders(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, content in {
        "b.txt": b"bee",
        "sub/a.md": b"ay\r\n",
        ".hidden": b"no",
        "c.bin": b"\xff\x00",
        "d": b"x\0y",
    }.items():
        (tmp_path / name).write_bytes(content)
    assert read_source(tmp_path / "b.txt") == read_source(str(tmp_path / "b.txt")) == "bee"
    assert read_source(tmp_path) == "bee\nay\n"
    assert read_source(tmp_path, max_bytes=5) == "bee\na"
    with pytest.raises(UsageError, match=r"UTF-8 text, but .*c\.bin"):
        read_source(tmp_path / "c.bin")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="found none"):
        read_source(tmp_path / "empty")


def test_unknown_sources():
    with pytest.raises(UsageError, match="did you mean 'sample'"):
        corpus_text("samples")
    with pytest.raises(UsageError, match=r"none of them \(did you mean 'python-stdlib'"):
        read_source("python-stdlb")
    with pytest.raises(UsageError, match="max_bytes to be an integer of at least 1, got 0"):
        corpus_text("sample", max_bytes=0)
    assert all(0 < len(line) < 90 for line in CORPORA.values())


def test_hugging_face_dataset(hub):
    assert read_source("hf:owner/name") == "one\ntwo"
    assert read_source("hf:owner/name:v2:validation", max_bytes=2) == "on"
    read_source("hf:owner/name::test")
    assert hub == [
        ("owner/name", None, "train", True),
        ("owner/name", "v2", "validation", True),
        ("owner/name", None, "test", True),
    ]


@pytest.mark.usefixtures("hub")
def test_hugging_face_errors_are_one_sentence(monkeypatch):
    with pytest.raises(
        CurvescopeError, match="could not read the Hugging Face dataset 'absent': no route"
    ) as found:
        read_source("hf:absent")
    assert "\n" not in str(found.value)
    with pytest.raises(UsageError, match="column of text in the dataset 'numbers', got id"):
        read_source("hf:numbers")
    with pytest.raises(UsageError, match="expected hf:NAME"):
        read_source("hf:a:b:c:d")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"needs the package datasets \(pip install '?datasets"):
        read_source("hf:owner/name")
