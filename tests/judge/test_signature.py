"""Communication signatures: the text, the differences, and what real plans communicate on a fake process group."""

import contextlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from conftest import DATA, ROOT
from processes import Children

from distbench.cli.main import main
from distbench.cli.signature import _files
from distbench.judge.communication_signature import (
    CommunicationPath,
    Signature,
    counted,
    differences,
    incomparable,
    load,
    parse,
    signatures_of,
)
from distbench.launch import Request, jobs_of
from distbench.records.run_file import Case
from distbench.spec import UserError, parse_mesh

GATHER = CommunicationPath(
    "forward", "tp", "all_gather", "tp", 2, "f32", 8400000, "layers.*.attention", "S(1)->R", True
)
REDUCE = CommunicationPath("backward", "fsdp", "reduce_scatter", "dp_shard", 4, "bf16", 512, "(root)")
MESH = {"dp_shard": 4, "tp": 2}


def signature_of(counts: dict[CommunicationPath, int], case: str = "step/x") -> Signature:
    return Signature("llama", MESH, "2.13.0", {case: counts})


def test_the_text_is_read_back_and_its_order_depends_on_nothing() -> None:
    base = signature_of({REDUCE: 1, GATHER: 4})
    text = base.to_text()
    assert text == signature_of({GATHER: 4, REDUCE: 1}).to_text()
    assert "4 x forward tp all_gather over tp (2), f32, 8400000 B: layers.*.attention, explicit S(1)->R\n" in text
    assert text.index("forward") < text.index("backward")
    assert parse(text, "file") == base
    nothing = signature_of({})
    assert "[step/x]\nnothing\n" in nothing.to_text() and parse(nothing.to_text(), "file") == nothing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a signature"),
        ("distbench signature, version 9\n", "this distbench reads version 1"),
        (
            "distbench signature, version 1\nscenario a\nmesh tp=2\ntorch 2\n\n[c]\n4 y forward\n",
            "line 7 is not a path",
        ),
        ("distbench signature, version 1\nscenario a\n", "has no line 'mesh'"),
        (
            "distbench signature, version 1\nscenario a\nmesh tp=2\ntorch 2\n\n[c]\npredicted peak memory x B\n",
            "line 7 is not a path",
        ),
    ],
)
def test_what_is_no_signature_says_so(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(text, "file")


def test_differences_name_module_collective_mesh_dim_and_bytes() -> None:
    base = signature_of({GATHER: 4, REDUCE: 1})
    assert differences(base, signature_of({REDUCE: 1, GATHER: 4})) == []
    more = CommunicationPath(
        "forward", "tp", "all_gather", "tp", 2, "f32", 8400000, "layers.*.attention.wq", "S(1)->R", False
    )
    [text] = differences(base, signature_of({GATHER: 4, REDUCE: 1, more: 1}))
    assert text == "step/x: layers.*.attention.wq, forward: +1 all_gather over tp (tp), 8.01 MiB f32, implicit S(1)->R"
    half = CommunicationPath("backward", "fsdp", "reduce_scatter", "dp_shard", 4, "f32", 1024, "(root)")
    [text] = differences(base, signature_of({GATHER: 4, half: 1}))
    assert text == "step/x: (root), backward: 1 reduce_scatter over dp_shard (fsdp) of 512 B bf16 became 1 KiB f32"
    [text] = differences(base, signature_of({GATHER: 3, REDUCE: 1}))
    assert "-1 all_gather over tp" in text
    assert differences(base, signature_of({GATHER: 4, REDUCE: 1}, "step/y")) == [
        "step/x: missing in the candidate",
        "step/y: not in the baseline",
    ]


def test_the_predicted_peak_of_memory_is_part_of_it() -> None:
    base = Signature("llama", MESH, "2.13.0", {"c": {GATHER: 1}}, {"c": 141507748})
    assert parse(base.to_text(), "file") == base
    more = Signature("llama", MESH, "2.13.0", {"c": {GATHER: 1}}, {"c": 150000000})
    [text] = differences(base, more)
    assert text == "c: predicted peak memory 135 MiB (141507748 B) became 143 MiB (150000000 B)"


def test_other_scenarios_and_meshes_are_not_compared() -> None:
    base = signature_of({})
    assert incomparable(base, base) is None
    of_tp = Signature("llama", {"tp": 2}, "2.13.0", {})
    assert incomparable(base, of_tp) == "mesh dp_shard=4,tp=2 in the baseline, tp=2 in the candidate"
    assert "scenario" in str(incomparable(base, Signature("other", MESH, "2.13.0", {})))


def job_of(scenario: str, *choices: str, mesh: str = "", quick: bool = False) -> Any:
    requested = parse_mesh(mesh) if mesh else None
    [job] = jobs_of(Request((scenario,), choices, requested, device="cpu", quick=quick, full_mesh=True), None)
    return job


@pytest.fixture(scope="module")
def written(children: Children) -> dict[str, Signature]:
    """Signatures of real plans, asked of one child process."""
    jobs = {
        "first": job_of("llama_2d", quick=True),
        "changes": job_of(str(DATA / "plan_changes.py")),
        "llama_2d": job_of("llama_2d", "dim=128", "hidden=512", "sequence=64"),
        "4096 ranks": job_of("llama_2d", "batch=512", mesh="dp_shard=512,tp=8", quick=True),
        "last": job_of("llama_2d", quick=True),
    }
    with children.forked():
        answers = dict(zip(jobs, signatures_of(list(jobs.values())), strict=True))
    assert not any(isinstance(answer, str) or answer[1] for answer in answers.values())
    return {name: answer[0] for name, answer in answers.items() if not isinstance(answer, str)}


@pytest.mark.long
def test_what_another_scenario_left_behind_changes_nothing(written: dict[str, Signature]) -> None:
    """Equal meshes share DTensor's caches; the baseline was written by another process, after other scenarios."""
    assert written["first"] == written["last"]
    base = load(ROOT / "signatures" / "llama_2d.signature")
    if base.torch == written["first"].torch:
        assert differences(base, written["first"]) == []


class CaseSpec:
    """Stands in for a case; it raises the error given where it is opened."""

    def __init__(self, name: str, error: Exception | None) -> None:
        self.case, self._error = Case(name, "step"), error

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        if self._error:
            raise self._error
        yield


def test_a_case_that_raises_is_left_out_and_named_unless_all_of_them_do(
    known_host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distbench.torch_private import Skipped
    from distbench.worker import child_verbs as worker

    (job,) = jobs_of(Request(("tp_mlp",), device="cpu"), None)
    case_specs = [
        CaseSpec("fine", None),
        CaseSpec("skipped", Skipped("no")),
        CaseSpec("raises", RuntimeError("not\nyet")),
    ]
    monkeypatch.setattr(worker, "all_cases", lambda *arguments: case_specs)
    monkeypatch.setattr(worker, "_of_case", lambda opened_case, context: {})
    result = worker.signature(job)
    assert (result["cases"], result["left_out"]) == ({"fine": {}}, {"raises": "RuntimeError: not"})
    del case_specs[0]
    with pytest.raises(UserError, match=r"no case runs .*: raises raises RuntimeError: not; check"):
        worker.signature(job)


def test_frozen_parameters_and_a_second_forward_have_a_predicted_peak() -> None:
    import torch

    from distbench.torch_private import peak_of_live_tensors

    model, given = torch.nn.Linear(4, 4), torch.ones(2, 4)
    once = peak_of_live_tensors(lambda: model(given).sum().backward(), model)
    # At least the parameters and their gradients, 4 bytes an element.
    assert once >= 2 * 20 * 4
    assert peak_of_live_tensors(lambda: [model(given).sum().backward() for _ in range(2)], model) >= once
    assert peak_of_live_tensors(lambda: model(given), model.requires_grad_(False)) >= 20 * 4


def total(counts: Counter[CommunicationPath]) -> Counter[tuple[str, str]]:
    result: Counter[tuple[str, str]] = Counter()
    for path, count in counts.items():
        result[path.mesh_dim, path.kind] += count
    return result


def test_the_sixty_collectives_of_a_step_with_tp_and_fsdp_are_found_and_owned(written: dict[str, Signature]) -> None:
    """What was counted by other means on such a model: 4 blocks, TP with sequence parallel x FSDP2 on 2x2."""
    result = written["llama_2d"]
    [counts] = result.cases.values()
    assert total(Counter(counts)) == {
        ("tp", "all_gather"): 19,
        ("tp", "reduce_scatter"): 18,
        ("tp", "all_reduce"): 9,
        ("dp_shard", "all_gather"): 9,
        ("dp_shard", "reduce_scatter"): 5,
    }
    assert not any(path.owner == "(unknown)" for path in counts)
    norms = {path.owner: count for path, count in counts.items() if path.kind == "all_reduce"}
    assert norms == {"layers.*.attention_norm": 4, "layers.*.ffn_norm": 4, "norm": 1}
    # A layer's FSDP unit gathers its share: 4 x 128 x 128 + 3 x 128 x 512 weights cut in two by TP, and two norms.
    [gather] = {path.payload_bytes for path in counts if path.source == "fsdp" and path.owner == "layers.*"}
    assert gather == ((4 * 128 * 128 + 3 * 128 * 512) // 2 + 2 * 128) * 4
    # Parameters, gradients and AdamW's two moments of a quarter of the model are the least that a rank holds.
    [peak] = result.peaks.values()
    num_parameters = 2 * 1000 * 128 + 4 * (4 * 128 * 128 + 3 * 128 * 512)
    assert peak > 4 * 4 * num_parameters / 4


def test_every_seeded_change_of_a_plan_is_seen_and_names_its_module(written: dict[str, Signature]) -> None:
    sys.path.insert(0, str(DATA))
    from plan_changes import CHANGES, NAMED

    by_change = {case.partition("change=")[2]: counts for case, counts in written["changes"].cases.items()}
    plain = by_change.pop("none")
    assert len(by_change) == 20 and set(by_change) == set(NAMED) == set(CHANGES)
    message = {
        change: differences(signature_of(dict(plain)), signature_of(dict(counts)))
        for change, counts in by_change.items()
    }
    for change, module in NAMED.items():
        assert any(text.startswith(f"step/x: {module}, ") for text in message[change]), (change, message[change])
    # And what became of it, where torch's own documentation says what that is.
    for change, expected in {
        "SequenceParallel dropped before attention": "layers.*.attention_norm, backward: -2 all_reduce over tp",
        "SequenceParallel dropped at the end": "norm, backward: -1 all_reduce over tp",
        "reshard_after_forward False": "layers.*, backward: -2 all_gather over dp_shard (fsdp)",
        "three gathers before attention": "layers.*.attention.wq, forward: +2 all_gather over tp",
        "the last norm redistributed": "norm, forward: +1 all_gather over tp",
        "one layer's feed_forward gathers twice": "layers.*.feed_forward.w1, forward: +1 all_gather over tp",
        "parameters gathered in bf16": "f32 became",
    }.items():
        assert any(expected in text for text in message[change]), message[change]


def test_the_world_may_be_of_any_size(written: dict[str, Signature]) -> None:
    [counts] = written["4096 ranks"].cases.values()
    assert {(path.mesh_dim, path.group_size) for path in counts} == {("dp_shard", 512), ("tp", 8)}


def signature_command(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["signature", "write", *map(str, arguments)])


def test_several_scenarios_go_into_a_folder_and_a_plan_that_cannot_work_is_a_sentence(
    forked_children: None, tmp_path: FilePath
) -> None:
    done = signature_command("llama_2d", "tp_mlp", "--mesh", "tp=3", "--output-dir", tmp_path / "new")
    assert done.exit_code == 2 and done.output.count("tp") > 1 and "Traceback" not in done.output
    assert len(done.output.splitlines()) <= 12 and "llama_2d" in done.output and "tp_mlp" in done.output
    assert not list((tmp_path / "new").iterdir())


def test_a_refused_scenario_does_not_keep_the_others_from_being_written(
    forked_children: None, tmp_path: FilePath
) -> None:
    done = signature_command("fsdp_stack", "tp_mlp", "--mesh", "tp=2", "--quick", "--output-dir", tmp_path)
    assert done.exit_code == 2 and "no signature of fsdp_stack: " in done.stderr, done.output
    assert [path.name for path in tmp_path.iterdir()] == ["tp_mlp.signature"]


@pytest.mark.parametrize(
    ("there", "names", "output", "files"),
    [
        (None, ["a"], "signatures", ["signatures/a.signature"]),
        (None, ["a"], "deep/signatures", ["deep/signatures/a.signature"]),
        (None, ["a", "b"], "signatures", ["signatures/a.signature", "signatures/b.signature"]),
        (None, ["a"], "a.signature", ["a.signature"]),
        ("file", ["a"], "signatures", ["signatures"]),
        ("folder", ["a"], "v1.2", ["v1.2/a.signature"]),
    ],
)
def test_an_old_output_without_a_suffix_is_a_folder(
    tmp_path: FilePath, there: str | None, names: list[str], output: str, files: list[str]
) -> None:
    if there == "file":
        (tmp_path / output).touch()
    if there == "folder":
        (tmp_path / output).mkdir()
    assert [*_files(names, tmp_path / output, None).values()] == [tmp_path / file for file in files]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tp_mlp", "-o", "no/file.signature"], "the folder no does not exist"),
        (["tp_mlp", "tp_attention"], "--output-dir DIR"),
        (["tp_mlp", "tp_attention", "--output-dir", __file__], "cannot be created"),
        ([str(DATA / "tiny.py"), str(DATA / "pairs.py"), "-o", __file__ + "/x"], "cannot be created"),
    ],
)
def test_where_signatures_cannot_go_is_told_before_any_is_made(
    known_host: None, arguments: list[str], message: str
) -> None:
    done = signature_command(*arguments)
    assert done.exit_code == 2 and message in done.output and "Traceback" not in done.output


def test_communications_are_counted_by_path_with_layers_folded() -> None:
    record = {
        "phase": "forward",
        "source": "tp",
        "kind": "all_gather",
        "op": "o",
        "mesh_dim": "tp",
        "group_size": 2,
        "dtype": "f32",
        "payload_bytes": 8,
        "owner": "layers.0.wq",
        "owner_known": True,
        "redistribution": "",
        "explicit": None,
    }
    [(path, count)] = counted([record, {**record, "owner": "layers.11.wq"}]).items()
    assert (path.owner, count) == ("layers.*.wq", 2)
    [other] = counted([{**record, "owner_known": False}])
    assert other.owner == "(unknown)"


def test_every_collective_of_a_shipped_scenarios_step_has_an_owner() -> None:
    """At least 97 % of each are asked for. Collectives and redistributions that are timed on their own have none."""
    with_steps = set()
    for file in sorted((ROOT / "signatures").glob("*.signature")):
        counts: Counter[bool] = Counter()
        for section in file.read_text().split("\n[")[1:]:
            if section.startswith("step/"):
                for row in re.findall(r"^(\d+) x .* B: (\S+)", section, re.MULTILINE):
                    counts[not row[1].startswith("(unknown)")] += int(row[0])
        with_steps |= {file.stem} if counts else set()
        assert not counts[False], f"{file.stem}: {counts[False]} of {counts.total()} have no owner"
    asked_for = {"llama_2d", "llama_3d", "pipeline", "moe", "moe_tp", "replicate_tp", "ddp", "llama_inference"}
    assert asked_for < with_steps and len(with_steps) >= 16


def gate(*arguments: object) -> tuple[int, str]:
    verb = "update" if "--update" in arguments else "check"
    words = [str(argument) for argument in arguments if argument != "--update"]
    done = CliRunner().invoke(main, ["signature", verb, *words])
    return done.exit_code, done.output


def test_the_exact_gate_passes_the_same_and_fails_on_any_difference(tmp_path: FilePath) -> None:
    base, new = tmp_path / "base.signature", tmp_path / "new.signature"
    base.write_text(signature_of({GATHER: 4}).to_text())
    new.write_text(signature_of({GATHER: 4}).to_text().replace("torch 2.13.0", "torch 2.14.0"))
    torches = "torch: 2.13.0 in the baseline, 2.14.0 in the candidate"
    assert gate(base, new) == (
        0,
        f"{torches}\nPASS: 1 signature unchanged\nNext: distbench ab REF_A REF_B -- SCENARIO   (compares times)\n",
    )
    new.write_text(signature_of({GATHER: 5}).to_text())
    code, output = gate(base, new)
    assert code == 1 and "layers.*.attention, forward: +1 all_gather over tp (tp), 8.01 MiB f32" in output
    assert gate(base, new, "--update")[0] == 0 and base.read_text() == new.read_text()
    assert gate(base, new)[0] == 0


def test_what_another_torch_communicates_is_no_changed_plan_and_is_stored_beside(tmp_path: FilePath) -> None:
    base, new = tmp_path / "base", tmp_path / "new"
    base.mkdir()
    new.mkdir()

    def written(folder: FilePath, count: int, torch: str) -> None:
        (folder / "llama.signature").write_text(Signature("llama", MESH, torch, {"c": {GATHER: count}}).to_text())

    written(base, 4, "2.13.0+cpu")
    written(new, 8, "2.15.0+cu132")
    code, output = gate(base, new)
    assert code == 4 and "2.15.0" in output and "2.13.0" in output and "+4 all_gather" in output
    assert gate(base, new, "--update")[0] == 0
    assert sorted(path.name for path in base.iterdir()) == ["llama.signature", "llama.torch-2.15.signature"]
    assert gate(base, new)[0] == 0, "2.15 is compared with its own"
    written(new, 4, "2.14.1")
    assert gate(base, new)[0] == 0, "2.14 is compared with what 2.13 wrote"
    assert gate(base / "llama.signature", new / "llama.signature")[0] == 0
    written(new, 8, "2.16.0")
    assert gate(base, new)[0] == 0 and gate(base, new, "--update")[0] == 0
    assert len(list(base.iterdir())) == 2, "a version that changes nothing stores nothing"
    written(new, 5, "2.15.1")
    assert gate(base, new)[0] == 1, "a changed plan"
    written(new, 6, "2.11.0")
    assert gate(base, new)[0] == 4 and gate(base, new, "--update")[0] == 0 and gate(base, new)[0] == 0
    written(new, 4, "2.13.1")
    assert gate(base, new)[0] == 0, "2.13 is compared with what 2.13 wrote, not with 2.11's"


def test_the_exact_gate_never_passes_what_it_did_not_compare(tmp_path: FilePath) -> None:
    base, new = tmp_path / "base.signature", tmp_path / "new.signature"
    for one, counts in ((base, {}), (new, {})):
        one.write_text(signature_of(counts).to_text())
    code, output = gate(base, new)
    assert code == 4 and "nothing was compared" in output
    new.write_text(Signature("llama", {"tp": 2}, "2.13.0", {"c": {GATHER: 1}}).to_text())
    code, output = gate(base, new)
    assert code == 4 and "mesh dp_shard=4,tp=2 in the baseline, tp=2 in the candidate" in output
    code, output = gate(base, tmp_path / "nowhere")
    assert code == 2 and "cannot be read" in output


def test_folders_of_signatures_are_compared_by_name(tmp_path: FilePath) -> None:
    sides = [tmp_path / "base", tmp_path / "new"]
    for side in sides:
        side.mkdir()
        (side / "one.signature").write_text(signature_of({GATHER: 1}).to_text())
    assert gate(*sides)[0] == 0
    (sides[0] / "two.signature").write_text(signature_of({GATHER: 1}).to_text())
    code, output = gate(*sides)
    assert code == 4 and "two.signature: missing in" in output
    (sides[1] / "three.signature").write_text(signature_of({REDUCE: 1}).to_text())
    gate(*sides, "--update")
    assert (sides[0] / "three.signature").exists()


def test_what_ci_reads_of_the_exact_gate(tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file is the same, one differs in two paths, and one is missing on either side."""
    sides, summary = [tmp_path / "base", tmp_path / "new"], tmp_path / "summary.md"
    for side, counts in zip(sides, ({GATHER: 1, REDUCE: 1}, {GATHER: 3}), strict=True):
        side.mkdir()
        (side / "same.signature").write_text(signature_of({GATHER: 1}).to_text())
        (side / "changed.signature").write_text(signature_of(counts).to_text())
        (side / f"{side.name}.signature").write_text(signature_of({REDUCE: 1}).to_text())
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    code, output = gate(
        *sides, "--github", "--write", f"junit={tmp_path / 'x.xml'}", "--write", f"json={tmp_path / 'j'}"
    )
    assert code == 1
    errors = [line for line in output.splitlines() if line.startswith("::error title=")]
    assert len(errors) == 4 and "title=changed.signature::step/x: (root), backward: -1 reduce_scatter" in output
    tags = {
        one.get("name"): [child.tag for child in one] for one in ElementTree.parse(tmp_path / "x.xml").iter("testcase")
    }
    assert tags == {
        "changed.signature": ["failure"],
        "same.signature": ["system-out"],
        "base.signature": ["error"],
        "new.signature": ["error"],
    }
    result = json.loads((tmp_path / "j").read_text())
    assert result["exit_code"] == 1 and result["same"] == ["same.signature"]
    assert [len(texts) for texts in result["changed"].values()] == [2] and len(result["uncompared"]) == 2
    page = summary.read_text()
    assert page.startswith("# exact gate: FAIL: 1 of 2 signatures changed (2 differences)") and page.count("\n- ") == 4


def test_an_exact_gate_that_compared_nothing_is_an_error_for_ci_too(tmp_path: FilePath) -> None:
    one = tmp_path / "one.signature"
    one.write_text(signature_of({}).to_text())
    code, output = gate(one, one, "--format", "junit")
    assert code == 4
    root = ElementTree.fromstring(output[output.index("<testsuites") : output.index("</testsuites>") + 13])
    assert [suite.get("errors") for suite in root] == ["1"]
    assert gate(one, one, "--format", "github")[1].startswith("::error title=distbench gate::NO VERDICT")
