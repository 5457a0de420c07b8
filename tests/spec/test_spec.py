import importlib
from pathlib import Path

import pytest

from distbench import spec
from distbench.launch import Request, jobs_of
from distbench.spec import Entry, UserError, find, fit_mesh, list_entries, parse_mesh, placement_pairs
from distbench.spec.discovery import read_entries, scenario_folder
from distbench.spec.job import Job, Settings, axis_names, parse_choices, variants_of

SHIPPED = {
    "collectives",
    "tp_mlp",
    "tp_attention",
    "fsdp_stack",
    "cp_attention",
    "llama_2d",
    "redistribute",
}


def entry(**changes: object) -> Entry:
    fields = {
        "name": "demo",
        "file": Path("demo.py"),
        "mesh": {"tp": 2},
        "axes": {"rotate": ("allgather", "alltoall"), "on": (True, False)},
        "quick": {"dim": 8},
        "tags": (),
        "summary": "",
        "params": {"rotate": "allgather", "on": True, "dim": 64},
    }
    return Entry(**{**fields, **changes})


def test_what_is_taken_from_the_room_is_of_the_file_that_defines_it() -> None:
    """Also `scenario`, whose file has its name and was imported."""
    assert importlib.import_module("distbench.spec.scenario").scenario is spec.scenario
    for name in spec.__all__:
        result = getattr(spec, name)
        assert result.__name__ == name and result.__module__.startswith("distbench.spec."), name
    with pytest.raises(ImportError, match="nothing_of_that_name"):
        exec("from distbench.spec import nothing_of_that_name")


def test_every_scenario_of_the_issue_is_shipped_with_a_summary() -> None:
    entries = list_entries()
    assert {result.name for result in entries} >= SHIPPED
    assert all(result.summary and result.mesh and result.tags for result in entries)


def test_the_list_of_shipped_scenarios_is_that_of_their_whole_files() -> None:
    """The list parses declarations only."""
    files = sorted(scenario_folder().glob("*.py"))
    entries = [result for file in files for result in read_entries(file)]
    assert sorted(entries, key=lambda result: result.name) == list_entries()


def test_every_parameter_of_a_shipped_scenario_can_be_given_with_set() -> None:
    for result in list_entries():
        for name, default in result.params.items():
            given = "text" if default == "" else default
            assert parse_choices([f"{name}={given}"], result.params) == {name: [given]}, f"{result.name}: {name}"


def test_a_smaller_mesh_under_quick_is_part_of_the_header(known_host: None, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from distbench.spec import scenario\n\n"
        "@scenario(mesh={'tp': 8}, quick_mesh={'tp': 2})\ndef mine(*, dim: int = 8):\n    'One.'\n"
    )
    sizes = {
        quick: jobs_of(Request((str(file),), device="cpu", quick=quick, out=tmp_path), None)[0].mesh["tp"]
        for quick in (False, True)
    }
    assert sizes == {False: 8, True: 2}
    requested = Request((str(file),), mesh={"tp": 4}, device="cpu", quick=True, out=tmp_path)
    assert jobs_of(requested, None)[0].mesh == {"tp": 4}


def test_mesh_text_keeps_order_and_sizes() -> None:
    assert list(parse_mesh("dp_shard=2,tp=4").items()) == [("dp_shard", 2), ("tp", 4)]


@pytest.mark.parametrize("text", ["tp", "tp=0", "tp=x", "tp=2,tp=2", "=2", "dim=2", ""])
def test_bad_mesh_text_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(UserError, match=r"[;:]"):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("ranks", "fitted"),
    [
        (4, {"dp_shard": 2, "tp": 2}),
        (8, {"dp_shard": 4, "tp": 2}),
        (2, {"dp_shard": 1, "tp": 2}),
        (1, {"dp_shard": 1, "tp": 1}),
        (3, {"dp_shard": 3, "tp": 1}),
    ],
)
def test_a_mesh_is_fitted_to_the_ranks_from_its_last_mesh_dim(ranks: int, fitted: dict[str, int]) -> None:
    assert fit_mesh({"dp_shard": 2, "tp": 2}, ranks) == fitted


def test_placement_pairs_are_all_ordered_pairs() -> None:
    pairs = placement_pairs(2)
    # 16 sources x 9 targets, less the 9 that are equal.
    assert len(pairs) == len(set(pairs)) == 16 * 9 - 9
    assert (("P(sum)", "S(0)"), ("S(1)", "R")) in pairs
    assert not any("P(sum)" in target for _, target in pairs)


def test_unset_axes_run_in_all_combinations() -> None:
    variants = variants_of(entry(), {}, quick=False)
    assert len(variants) == 4 and all(variant["dim"] == 64 for variant in variants)
    assert axis_names(variants, entry()) == ["rotate", "on"]


def test_a_set_axis_is_pinned_and_beats_the_quick_size() -> None:
    chosen = parse_choices(["rotate=alltoall", "dim=32"], entry().params)
    variants = variants_of(entry(), chosen, quick=True)
    assert [(variant["rotate"], variant["dim"]) for variant in variants] == [("alltoall", 32)] * 2
    assert all(variant["dim"] == 8 for variant in variants_of(entry(), {}, quick=True))


def test_a_set_parameter_with_several_values_becomes_an_axis() -> None:
    variants = variants_of(entry(axes={}), parse_choices(["dim=1,2,3"], entry().params), quick=False)
    assert [variant["dim"] for variant in variants] == [1, 2, 3]
    assert axis_names(variants, entry(axes={})) == ["dim"]


@pytest.mark.parametrize("text", ["dim", "dim=x", "=3", "dim="])
def test_bad_choices_are_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_choices([text], entry().params)


def test_an_unknown_axis_names_the_nearest() -> None:
    with pytest.raises(UserError, match="nearest: rotate"):
        variants_of(entry(), {"rotat": ["x"]}, quick=False)


def test_an_unknown_scenario_names_the_nearest() -> None:
    with pytest.raises(UserError, match="nearest: llama_2d"):
        find("lama_2d")


def write(folder: Path, text: str) -> str:
    file = folder / "mine.py"
    file.write_text(text)
    return str(file)


def test_a_file_anywhere_is_found_without_importing_it(tmp_path: Path) -> None:
    text = "import nothing_like_this\n@scenario(mesh={'tp': 2})\ndef mine(*, x: int = 1):\n    'Doc.'\n"
    path = write(tmp_path, text)
    assert [result.name for result in find(path)] == ["mine"]
    assert find(f"{path}::mine")[0].params == {"x": 1}


def test_a_summary_is_the_first_paragraph(tmp_path: Path) -> None:
    docstring = repr("One sentence that goes on\n    in the next line.\n\n    And more.\n    ")
    path = write(tmp_path, f"@scenario(mesh={{'tp': 2}})\ndef mine():\n    {docstring}\n")
    assert find(path)[0].summary == "One sentence that goes on in the next line."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def broken(:\n", "line 1 is not valid Python"),
        ("@scenario(mesh=MESH)\ndef f(): ...\n", "not a literal"),
        ("@scenario(tags=())\ndef f(): ...\n", "needs a mesh"),
        ("@scenario(mesh={'tp': 2}, axis={})\ndef f(): ...\n", "has no argument 'axis'"),
        ("@scenario(mesh={'tp': 2}, axes={'y': (1,)})\ndef f(*, x=1): ...\n", "'y' is not a parameter"),
        ("@scenario(mesh={'tp': 2})\ndef f(x=1): ...\n", "keyword-only"),
        ("@scenario(mesh={'rows': 2})\ndef f(): ...\n", "'rows' is unknown"),
        ("x = 1\n", "no scenario"),
        ("x = '\0'\n", "cannot be read|not valid Python"),
        ("@scenario(mesh={[]: 2})\ndef f(): ...\n", "not a literal"),
    ],
)
def test_a_bad_scenario_file_is_one_clear_sentence(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        find(write(tmp_path, text))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "mesh=3", "mesh={}", "mesh={'tp': 'x'}", "mesh={'tp': 0}", "mesh={'tp': True}", "mesh={3: 2}",
        "quick_mesh=3", "quick_mesh={}", "quick_mesh={'tp': 2.5}", "axes=3", "axes={'x': 3}", "axes={'x': ()}",
        "axes={'x': 'abc'}", "quick=[1]", "quick=3", "tags=5", "tags=(1, 2)", "tags='abc'",
    ],
)  # fmt: skip
def test_an_argument_of_another_type_names_itself_and_one_that_fits(tmp_path: Path, text: str) -> None:
    mesh = "" if text.startswith("mesh") else "mesh={'tp': 2}, "
    source = f"@scenario({mesh}{text})\ndef f(*, x=1): ...\n"
    name = text.partition("=")[0]
    with pytest.raises(UserError, match=rf"scenario 'f': {name}=.* is not valid; write for example {name}="):
        find(write(tmp_path, source))


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    job = Job(
        "r",
        "i",
        "s",
        "f.py",
        [{"x": 1}],
        ["x"],
        {"tp": 2},
        "cpu",
        Settings.quick(),
        "a",
        "b",
        3.0,
        4.0,
        environment={"k": 1},
    )
    job.save(tmp_path / "job.json")
    assert Job.load(tmp_path / "job.json") == job


def test_many_cases_share_the_budget() -> None:
    settings = Settings(max_case_s=5.0, budget_s=100.0)
    assert settings.case_limit_s(10) == 5.0
    assert settings.case_limit_s(1000) == 0.1


PARAMS = {"eval": False, "hidden": 8, "sizes": (1, 2), "layers": [1], "lr": 0.1, "rotate": "a", "shape": None}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("eval=true,False,YES,no,1,0,on,Off", [True, False, True, False, True, False, True, False]),
        ("sizes=(1,2),(3,4)", [(1, 2), (3, 4)]),
        ("sizes=(1, 2)", [(1, 2)]),
        ("sizes=[5]", [(5,)]),
        ("layers=(5,6)", [[5, 6]]),
        ("hidden=8,16", [8, 16]),
        ("lr=1,1e-3", [1, 1e-3]),
        ("rotate=(a,b)", ["(a", "b)"]),
        ("shape=(1,2),x", [(1, 2), "x"]),
        ("shape=a b,c", ["a b", "c"]),
    ],
)
def test_a_value_is_read_as_its_default_s_type(text: str, values: list[object]) -> None:
    name = text.partition("=")[0]
    result = parse_choices([text], PARAMS)[name]
    assert result == values and list(map(type, result)) == list(map(type, values))


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("hidden=True", "int values such as 8"),
        ("hidden=8,,16", "int values such as 8"),
        ("hidden=1.5", "int values such as 8"),
        ("lr=True", "float values such as 0.1"),
        ("eval=2", "true or false"),
        ("eval=maybe", "true or false"),
        ("sizes=(1", "tuple values such as (1, 2)"),
        ("sizes=1,2", "tuple values such as (1, 2)"),
        ("hidden=" + "-" * 20_000 + "1", "int values such as 8"),
        ("plan.microbatches=True", "int values such as 2"),
    ],
)
def test_a_value_of_another_type_is_refused(text: str, allowed: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_choices([text], PARAMS)
    assert allowed in str(refused.value)
