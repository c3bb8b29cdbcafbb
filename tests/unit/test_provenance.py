import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from specbuild import provenance
from specbuild.provenance import FILE, Record, digest_artifact, digest_files, make_artifact, new_directory

RECORD = Record("convert", {"dtype": "bfloat16", "tp": 1}, {"model": "abc"}, ("numpy",))


def make_files(out):
    (out / "sub").mkdir()
    (out / "a.bin").write_bytes(b"aaaa")
    (out / "sub" / "b.bin").write_bytes(b"bbbb")


def names(directory):
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*"))


def test_a_finished_directory_holds_its_files_and_its_record(tmp_path):
    assert make_artifact(tmp_path / "work" / "out", RECORD, False, make_files)
    assert names(tmp_path / "work") == ["out", "out/a.bin", f"out/{FILE}", "out/sub", "out/sub/b.bin"]
    record = json.loads((tmp_path / "work" / "out" / FILE).read_text())
    assert (record["stage"], record["parameters"], record["inputs"]) == ("convert", {"dtype": "bfloat16", "tp": 1}, {"model": "abc"})
    assert record["packages"].keys() == {"numpy"}


def test_the_same_record_again_is_skipped_unless_forced(tmp_path):
    make_artifact(tmp_path / "out", RECORD, False, make_files)
    assert not make_artifact(tmp_path / "out", RECORD, False, pytest.fail)
    assert make_artifact(tmp_path / "out", RECORD, True, make_files)


@pytest.mark.parametrize(
    "other",
    [
        Record("quantize", RECORD.parameters, RECORD.inputs, ("numpy",)),
        Record("convert", {"dtype": "float16", "tp": 1}, RECORD.inputs, ("numpy",)),
        Record("convert", RECORD.parameters, {"model": "abd"}, ("numpy",)),
        Record("convert", RECORD.parameters, RECORD.inputs, ("numpy", "torch")),
    ],
    ids=["stage", "parameter", "input", "package"],
)
def test_another_record_is_made_anew(tmp_path, other):
    make_artifact(tmp_path / "out", RECORD, False, make_files)
    assert make_artifact(tmp_path / "out", other, False, make_files)


def test_another_version_of_a_package_is_made_anew(tmp_path, monkeypatch):
    make_artifact(tmp_path / "out", RECORD, False, make_files)
    monkeypatch.setattr(provenance, "find_version", lambda name: "0.0")
    assert make_artifact(tmp_path / "out", RECORD, False, make_files)


def spoil_record(text):
    return lambda out: (out / FILE).write_text(text)


@pytest.mark.parametrize(
    "damage",
    [
        lambda out: (out / "a.bin").unlink(),
        lambda out: (out / "sub" / "b.bin").write_bytes(b"bbb"),
        lambda out: (out / "sub" / "b.bin").write_bytes(b"bbbX"),
        lambda out: (out / FILE).unlink(),
        spoil_record(""),
        spoil_record("[]"),
        spoil_record("{}"),
    ],
    ids=["missing", "truncated", "same size, other content", "no record", "empty record", "list record", "bare record"],
)
def test_a_damaged_output_is_made_anew(tmp_path, damage):
    make_artifact(tmp_path / "out", RECORD, False, make_files)
    damage(tmp_path / "out")
    assert make_artifact(tmp_path / "out", RECORD, False, make_files)
    assert (tmp_path / "out" / "a.bin").read_bytes() == b"aaaa"
    assert (tmp_path / "out" / "sub" / "b.bin").read_bytes() == b"bbbb"


def fail_half_way(out):
    (out / "half").write_text("x")
    raise RuntimeError("half-way")


def test_a_failed_run_leaves_nothing_behind(tmp_path):
    with pytest.raises(RuntimeError, match="half-way"):
        make_artifact(tmp_path / "work" / "target" / "out", RECORD, False, fail_half_way)
    assert names(tmp_path) == []


def test_a_failed_run_leaves_the_earlier_result(tmp_path):
    make_artifact(tmp_path / "out", RECORD, False, make_files)
    before = names(tmp_path)
    with pytest.raises(RuntimeError, match="half-way"):
        make_artifact(tmp_path / "out", RECORD, True, fail_half_way)
    assert names(tmp_path) == before


def test_the_final_name_appears_only_when_the_block_has_ended(tmp_path):
    final = tmp_path / "out"
    with new_directory(final) as partial:
        assert not final.exists()
        assert partial.parent == final.parent
        (partial / "x").write_text("new")
    assert (final / "x").read_text() == "new"
    assert names(tmp_path) == ["out", "out/x"]


def test_directories_of_killed_runs_are_removed(tmp_path):
    (tmp_path / ".out.x1y2.partial").mkdir()
    make_artifact(tmp_path / "out", RECORD, False, lambda out: (out / "x").write_text("new"))
    assert names(tmp_path) == ["out", "out/specbuild.json", "out/x"]


def test_what_others_keep_beside_a_result_is_not_removed(tmp_path):
    """The directory beside it is the user's own: of `deploy --out DIR`, the one that the command is called in."""
    others = [".mine.partial", ".outer.x1y2.partial"]
    for name in others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "kept").touch()
    make_artifact(tmp_path / "out", RECORD, False, lambda out: (out / "x").write_text("new"))
    assert all((tmp_path / name / "kept").exists() for name in others)


def test_two_runs_of_one_stage_wait_for_each_other(tmp_path):
    """The second finds what the first made, and neither takes the other's temporary directory for an abandoned one."""
    made = []

    def make(out):
        made.append(out)
        time.sleep(0.2)
        (out / "x").write_text("new")

    with ThreadPoolExecutor(4) as pool:
        ran = list(pool.map(lambda _: make_artifact(tmp_path / "out", RECORD, False, make), range(4)))
    assert sorted(ran) == [False, False, False, True]
    assert len(made) == 1
    assert names(tmp_path) == ["out", "out/specbuild.json", "out/x"]


def test_digests_change_with_names_and_content_and_not_with_order_or_place(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    for name, content in {"a": b"1", "b": b"2", "elsewhere/a": b"1", "elsewhere/b": b"2"}.items():
        (tmp_path / name).write_bytes(content)
    a, b = tmp_path / "a", tmp_path / "b"
    first = digest_files([a, b])
    assert digest_files([b, a]) == first
    assert digest_files((tmp_path / "elsewhere").iterdir()) == first
    assert digest_files([a]) != first
    b.write_bytes(b"3")
    assert digest_files([a, b]) != first
    b.rename(tmp_path / "c")
    (tmp_path / "c").write_bytes(b"2")
    assert digest_files([a, tmp_path / "c"]) != first


@pytest.mark.parametrize("place", [0, 100, -1])
def test_a_large_file_changes_its_digest_wherever_it_is_edited(tmp_path, monkeypatch, place):
    monkeypatch.setattr(provenance, "_WHOLE", 64)
    monkeypatch.setattr(provenance, "_END", 16)
    path = tmp_path / "large"
    path.write_bytes(bytes(200))
    os.utime(path, ns=(1, 1))
    before = digest_files([path])
    content = bytearray(200)
    content[place] = 1
    path.write_bytes(content)
    assert digest_files([path]) != before


def test_an_artifact_is_digested_by_its_record(tmp_path):
    make_artifact(tmp_path / "one", RECORD, False, make_files)
    make_artifact(tmp_path / "two", RECORD, False, make_files)
    make_artifact(tmp_path / "three", Record("convert", {"tp": 2}, {}), False, make_files)
    assert digest_artifact(tmp_path / "one") == digest_artifact(tmp_path / "two") != digest_artifact(tmp_path / "three")
