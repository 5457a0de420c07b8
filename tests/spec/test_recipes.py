"""Recipes: names of registered configurations, which are read without an import of their packages."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from distbench.launch import Request, jobs_of
from distbench.spec import UserError, find
from distbench.spec.recipes import FAMILIES, recipe_configs, registries

REGISTRY = """
from torchtitan.trainer import Trainer

def llama9_debugmodel() -> Trainer.Config: ...
def llama9_8b() -> Trainer.Config: ...
def changed(config: Trainer.Config) -> Trainer.Config: ...
def converters() -> list[str]: ...
"""


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty package of that name: recipes of `hf` are a table of distbench's own."""
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "transformers", raising=False)


def test_a_recipe_is_its_source_with_one_configuration(transformers: None, known_host: None, tmp_path: Path) -> None:
    (entry,) = find("hf:llama@8B")
    assert entry.axes == {"config": ("llama@8B",)} and "real-size" in entry.tags
    assert entry.params["config"] == "llama@8B"  # from which a search of plans begins
    assert "real-size" not in find("hf:llama@tiny")[0].tags  # which a CPU may run
    targets = ("hf:llama@8B", "hf:qwen3@8B", "hf:llama@8B")
    jobs = jobs_of(Request(targets, device="cpu", out=tmp_path, shapes_only=True), None)
    assert [job.variants[0]["config"] for job in jobs] == ["llama@8B", "qwen3@8B"]
    assert {len(job.variants) for job in jobs} == {1}


def test_a_source_alone_has_all_configurations(transformers: None) -> None:
    (entry,) = find("hf")
    assert len(entry.axes["config"]) == len(recipe_configs("hf"))
    with pytest.raises(UserError, match="no recipe hf: "):
        find("hf:")


@pytest.mark.parametrize("target", ["hf:llama@80B", "hf:lama@8B", "hf:llama"])
def test_an_unknown_configuration_gets_the_nearest_ones(transformers: None, target: str) -> None:
    with pytest.raises(UserError, match=r"no recipe hf:\S+ \(nearest: .*llama@8B.*`distbench list hf` shows all"):
        find(target)


@pytest.mark.parametrize(
    ("source", "command"), [("hf", "pip install 'distbench[hf]'"), ("torchtitan", "pip install torchtitan==0.3.0")]
)
def test_a_package_that_is_not_installed_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch, source: str, command: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"recipes of {source} need .*, which is not installed; .*") as raised:
        find(f"{source}:any")
    assert str(raised.value).endswith(command)


def test_torchtitans_registries_are_read_and_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for model, text in (("llama9", REGISTRY), ("other", "raise ImportError\n")):
        folder = tmp_path / "torchtitan" / "models" / model
        folder.mkdir(parents=True)
        (folder / "config_registry.py").write_text(text)
    (tmp_path / "torchtitan" / "__init__.py").write_text("raise ImportError\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert registries() == {"llama9_debugmodel": "llama9", "llama9_8b": "llama9"}
    assert recipe_configs("torchtitan") == ["llama9_debugmodel", "llama9_8b"]
    assert "real-size" not in find("torchtitan:llama9_debugmodel")[0].tags


def test_every_family_has_small_sizes_and_published_ones() -> None:
    assert {"llama", "qwen3", "mixtral", "deepseek_v3", "gemma", "mistral", "phi", "gpt2", "bert"} <= {*FAMILIES}
    assert {"t5", "vit", "mamba"} <= {*FAMILIES}
    for family in FAMILIES.values():
        assert {"tiny", "small"} < {*family.sizes} and family.sequence > 0


# Published numbers of parameters; of ViT without its head of 1,000 classes and with one of two.
COUNTS = {
    "llama@8B": 8_030_261_248,
    "gpt2@124M": 124_439_808,
    "t5@60M": 60_506_624,
    "mixtral@8x7B": 46_702_792_704,
}


@pytest.mark.parametrize("config", COUNTS)
@pytest.mark.long
def test_a_model_at_a_published_size_has_the_published_number_of_parameters(config: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    import torch

    from distbench.worker.rank_session import declared, load_scenario

    (entry,) = find(f"hf:{config}")
    scenario: Any = declared(load_scenario(entry.file, entry.name), {**entry.params, "config": config})
    with torch.device("meta"):
        model = scenario.build_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[config]
    assert (scenario.step_plan.tp == "auto") == (config in ("llama@8B", "mixtral@8x7B"))


@pytest.mark.filterwarnings("ignore")  # of torchtitan's imports
@pytest.mark.long
def test_torchtitans_configurations_are_built_with_their_own_parallelize_function() -> None:
    reason = "torchtitan is not installed with all that its registries import"
    try:
        importlib.import_module("torchtitan.models.llama3.config_registry")
    except ImportError:
        pytest.skip(reason)
    import torch

    from distbench.worker.rank_session import declared, load_scenario

    (entry,) = find("torchtitan:llama3_70b")
    function: Any = load_scenario(entry.file, entry.name)
    assert function.__globals__["own_tensor_parallel"]("llama3_70b") == 8
    scenario: Any = declared(function, {**entry.params, "config": "llama3_8b"})
    with torch.device("meta"):
        model = scenario.build_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS["llama@8B"]
    assert scenario.parallelize is not None and scenario.plan.fsdp is None
    assert scenario.omits == ("FlexAttention (causal scaled_dot_product_attention instead)",)
    blocks: Any = declared(function, {**entry.params, "config": "llama3_8b", "plan": "fsdp"})
    assert blocks.parallelize is None and blocks.plan.fsdp.wrap == ("layers.*",)
