"""Communication signatures: the text, the differences, and what real plans communicate on ranks that do not exist."""

from collections import Counter
from pathlib import Path as FilePath

import pytest
from click.testing import CliRunner
from conftest import DATA

from distbench.cli import main
from distbench.signature import Path, Signature, counted, differences, incomparable, parse

GATHER = Path("forward", "tp", "all_gather", "tp", 2, "f32", 8400000, "layers.*.attention", "S(1)->R", True)
REDUCE = Path("backward", "fsdp", "reduce_scatter", "dp_shard", 4, "bf16", 512, "(root)")
MESH = {"dp_shard": 4, "tp": 2}


def signature_of(counts: dict[Path, int], case: str = "step/x") -> Signature:
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
    ("text", "says"),
    [
        ("", "is no signature"),
        ("distbench signature, version 9\n", "newer than this distbench"),
        ("distbench signature, version 1\nscenario a\nmesh tp=2\ntorch 2\n\n[c]\n4 y forward\n", "line 7 is no path"),
        ("distbench signature, version 1\nscenario a\n", "lacks its line 'mesh'"),
    ],
)
def test_what_is_no_signature_says_so(text: str, says: str) -> None:
    from distbench.spec import UserError

    with pytest.raises(UserError, match=says):
        parse(text, "file")


def test_differences_name_module_collective_mesh_dim_and_bytes() -> None:
    base = signature_of({GATHER: 4, REDUCE: 1})
    assert differences(base, signature_of({REDUCE: 1, GATHER: 4})) == []
    more = Path("forward", "tp", "all_gather", "tp", 2, "f32", 8400000, "layers.*.attention.wq", "S(1)->R", False)
    [text] = differences(base, signature_of({GATHER: 4, REDUCE: 1, more: 1}))
    assert text == "step/x: layers.*.attention.wq, forward: +1 all_gather over tp (tp), 8.4 MB f32, implicit S(1)->R"
    half = Path("backward", "fsdp", "reduce_scatter", "dp_shard", 4, "f32", 1024, "(root)")
    [text] = differences(base, signature_of({GATHER: 4, half: 1}))
    assert text == "step/x: (root), backward: 1 reduce_scatter over dp_shard (fsdp) of 512 B bf16 became 1.02 KB f32"
    [text] = differences(base, signature_of({GATHER: 3, REDUCE: 1}))
    assert "-1 all_gather over tp" in text
    assert differences(base, signature_of({GATHER: 4, REDUCE: 1}, "step/y")) == ["step/x: is gone", "step/y: is new"]


def test_other_scenarios_and_meshes_are_not_compared() -> None:
    base = signature_of({})
    assert incomparable(base, base) is None
    assert incomparable(base, Signature("llama", {"tp": 2}, "2.13.0", {})) == "mesh dp_shard=4,tp=2 against tp=2"
    assert "scenario" in str(incomparable(base, Signature("other", MESH, "2.13.0", {})))


def signature_written(*arguments: str) -> Signature:
    done = CliRunner().invoke(main, ["signature", *arguments])
    assert done.exit_code == 0, done.output
    return parse(done.stdout, "printed")


def total(counts: Counter[Path]) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for path, count in counts.items():
        found[path.mesh_dim, path.kind] += count
    return found


def test_the_sixty_collectives_of_a_step_with_tp_and_fsdp_are_found_and_owned() -> None:
    """What was counted by other means on such a model: 4 blocks, TP with sequence parallel x FSDP2 on 2x2."""
    found = signature_written("llama_2d", "--set", "dim=128", "--set", "hidden=512", "--set", "sequence=64")
    [counts] = found.cases.values()
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


def test_every_seeded_change_of_a_plan_is_seen_and_names_its_module() -> None:
    found = signature_written(str(DATA / "plan_changes.py"))
    by_change = {case.partition("change=")[2]: counts for case, counts in found.cases.items()}
    plain = by_change.pop("none")
    assert len(by_change) == 20
    said = {
        change: differences(signature_of(dict(plain)), signature_of(dict(counts)))
        for change, counts in by_change.items()
    }
    assert all(said.values()), [change for change, texts in said.items() if not texts]
    # The module whose plan was changed is named, and what became of it.
    for change, says in {
        "SequenceParallel dropped before attention": "layers.*.attention_norm, backward: -2 all_reduce over tp",
        "SequenceParallel dropped at the end": "norm, backward: -1 all_reduce over tp",
        "reshard_after_forward False": "layers.*, backward: -2 all_gather over dp_shard (fsdp)",
        "three gathers before attention": "layers.*.attention.wq, forward: +2 all_gather over tp",
        "the last norm redistributed": "norm, forward: +1 all_gather over tp",
        "one layer's feed_forward gathers twice": "layers.*.feed_forward.w1, forward: +1 all_gather over tp",
        "parameters gathered in bf16": "f32 became",
    }.items():
        assert any(says in text for text in said[change]), said[change]


def test_the_world_may_be_of_any_size() -> None:
    found = signature_written("llama_2d", "--mesh", "dp_shard=512,tp=8", "--quick", "--set", "batch=512")
    [counts] = found.cases.values()
    assert {(path.mesh_dim, path.group_size) for path in counts} == {("dp_shard", 512), ("tp", 8)}


def test_a_plan_that_cannot_work_is_a_sentence(tmp_path: FilePath) -> None:
    done = CliRunner().invoke(main, ["signature", "llama_2d", "--mesh", "tp=3"])
    assert done.exit_code == 2 and "tp" in done.output and "Traceback" not in done.output
    done = CliRunner().invoke(main, ["signature", "tp_mlp", "-o", str(tmp_path / "no" / "file")])
    assert done.exit_code == 2 and "cannot be written" in done.output


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
