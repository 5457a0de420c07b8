"""`distbench.communication`: counts, bytes and signature files of a step in one's own test, on a fake group."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import distbench
from distbench.torch_private import fake_ranks

WIDTH = 16


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(WIDTH, 32, bias=False)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        output: torch.Tensor = self.lm_head(x)
        return output.clone()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_ranks({"dp_shard": 2, "tp": 2}) as mesh:
        yield mesh


def parallel(mesh: DeviceMesh, change: str = "") -> Model:
    """The model under TP and FSDP, or with one seeded change of its plan."""
    torch.manual_seed(0)
    model = Model(recompute=change == "recompute")
    layout = Shard(-1) if change == "logits sharded" else Replicate()
    plan: dict[str, Any] = {"lm_head": ColwiseParallel(output_layouts=layout)}
    if change != "down not parallel":
        plan |= {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    if change == "one layer left out":
        plan = {name.replace("*", "0"): style for name, style in plan.items()}
    if change == "inputs sharded":
        plan["lm_head"] = ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())
    if change != "no tp":
        parallelize_module(model, mesh["tp"], plan)
    options: dict[str, Any] = {"mesh": mesh["dp_shard"]}
    if change == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    if change == "reduce in bf16":
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    if change == "kept unsharded":
        options["reshard_after_forward"] = False
    if change != "no wrap":
        for layer in model.layers:
            fully_shard(layer, **options)
    if change != "no fsdp":
        fully_shard(model, **options)
    if change == "no gradient sync":
        model.set_requires_gradient_sync(False)
    return model


def step_of(model: nn.Module, clip: float = 0.0) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)  # also for parameters on several meshes

    def step() -> None:
        model(torch.ones(4, WIDTH)).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_counts_and_bytes_by_mesh_dim_module_and_phase(mesh: DeviceMesh) -> None:
    model = parallel(mesh)
    step = step_of(model, clip=1.0)
    with distbench.communication(model) as seen:
        step()
    assert seen.count("all_gather", on="tp", module="lm_head") == 1
    assert seen.count("all_reduce", on="tp", module="layers.*.down", phase="forward") == 2
    assert seen.count("reduce_scatter", on="dp_shard", phase="backward") == 3
    assert seen.count(phase="other", module="(step)") == 2  # the norm, over each mesh dim
    block, head = 2 * 4 * WIDTH * WIDTH * 4 // 2, 32 * WIDTH * 4 // 2  # bytes of a rank's part under tp
    assert seen.bytes("all_gather", on="dp_shard", phase="forward") == 2 * block + head
    step()
    assert seen.count() == len(seen.collectives) == 15  # nothing is recorded after the block


@pytest.mark.parametrize("mistake", [{"kind": "allgather"}, {"on": "pt"}, {"module": "lm_heads"}, {"phase": "bwd"}])
def test_a_misspelt_name_is_not_counted_as_none(mesh: DeviceMesh, mistake: dict[str, str]) -> None:
    with distbench.communication(parallel(mesh)) as seen:
        pass
    with pytest.raises(distbench.UserError, match=r"is unknown \(nearest: \w+"):
        seen.count(**mistake)


CHANGES = (
    *(
        "down not parallel",
        "logits sharded",
        "no gradient sync",
        "one layer left out",
        "inputs sharded",
        "no tp",
        "bf16",
    ),
    *("reduce in bf16", "kept unsharded", "no wrap", "no fsdp"),
)


@pytest.mark.long
def test_a_signature_file_matches_reruns_and_no_changed_plan(mesh: DeviceMesh, tmp_path: Path) -> None:
    file = tmp_path / "model.signature"
    model = parallel(mesh)
    step = step_of(model)
    for number in range(40):
        with distbench.communication(model, folder=tmp_path) as seen:
            step()
        if not number:
            seen.write("model.signature")
        assert seen.matches("model.signature")
    for change in CHANGES:
        model = parallel(mesh, change)
        with distbench.communication(model, mesh=mesh) as seen:
            step_of(model)()
        with pytest.raises(AssertionError, match=r"model\.signature:\n +communication: \S+, (for|back|oth)"):
            seen.matches(file)
    with distbench.communication(model := parallel(mesh)) as seen:
        step_of(model, clip=1.0)()
    with pytest.raises(AssertionError, match=r"\(step\), other: \+1 all_reduce over tp .*, 20 B f32"):
        seen.matches(file)


def test_recomputation_is_seen_in_backward(mesh: DeviceMesh) -> None:
    counts = []
    for change in ("", "recompute"):
        model = parallel(mesh, change)
        with distbench.communication(model) as seen:
            step_of(model)()
        counts.append([int(seen.count(phase=phase)) for phase in ("forward", "backward", "optimizer")])
    assert counts[0] == [6, 7, 0]
    assert counts[1] == [6, 7, 0]  # torch's early stop: the last all-reduce of a block is not recomputed


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("form", ["whole", "layers", "layers without graph breaks", "layers in wrappers"])
@pytest.mark.long
def test_names_and_counts_of_compiled_and_wrapped_modules(mesh: DeviceMesh, form: str) -> None:
    model: nn.Module = parallel(mesh, "no fsdp")
    for number, layer in enumerate(model.layers if form != "whole" else ()):
        if form == "layers in wrappers":
            model.layers[number] = checkpoint_wrapper(layer)
        else:
            layer.compile(backend="eager", fullgraph=form == "layers without graph breaks")
    if form == "whole":
        model = torch.compile(model, backend="eager")
    with distbench.communication(model) as seen:
        model(torch.ones(4, WIDTH)).square().mean().backward()
    assert seen.count("all_gather", on="tp", module="lm_head") == 1
    assert seen.count("all_reduce", on="tp", phase="forward") == 2
    # Hooks would break the graph, so the module around the layer is the owner.
    owner = "(root)" if form == "layers without graph breaks" else "layers.*.down"
    assert seen.count("all_reduce", on="tp", module=owner, phase="forward") == 2


def test_ddp_on_a_fake_group() -> None:
    with fake_ranks({"dp": 2}) as mesh:
        model = nn.parallel.DistributedDataParallel(Block())
        for _ in range(3):
            with distbench.communication(model, mesh=mesh) as seen:
                model(torch.ones(2, WIDTH)).sum().backward()
        assert seen.bytes("all_reduce", on="dp", phase="backward") == 4 * 2 * 4 * WIDTH * WIDTH


def test_a_failed_backward_ends_its_phase(mesh: DeviceMesh) -> None:
    def fail(gradient: torch.Tensor) -> torch.Tensor:
        raise FloatingPointError

    model, x = parallel(mesh), torch.ones(2, WIDTH)
    with distbench.communication(model) as seen:
        output = model(x)
        output.register_hook(fail)
        with pytest.raises(FloatingPointError):
            output.sum().backward()
        model(x)
    # FSDP prefetches in backward, and holds gathered parameters at the second forward: 6 collectives, then 4.
    assert (seen.count(phase="forward"), seen.count(phase="backward")) == (10, 1)


def test_without_a_process_group() -> None:
    with pytest.raises(distbench.UserError, match="needs a process group"), distbench.communication():
        pass


@pytest.mark.usefixtures("mesh")
def test_without_a_model_or_a_file(tmp_path: Path) -> None:
    with distbench.communication() as seen:
        dist.all_reduce(torch.ones(2))
    assert seen.count("all_reduce", on="?", phase="forward") == 1
    with pytest.raises(distbench.UserError, match="does not exist; write the file once"):
        seen.matches(tmp_path / "missing.signature")


def test_after_an_exception_in_a_block_the_next_block_is_complete(mesh: DeviceMesh) -> None:
    """A forward without backward leaves gathered parameters, which have no mesh of FSDP."""
    model, x = parallel(mesh, "no wrap"), torch.ones(2, WIDTH)
    with pytest.raises(FloatingPointError), distbench.communication(model):
        model(x)
        raise FloatingPointError
    inner = distbench.communication(model)
    with distbench.communication(model), pytest.raises(distbench.UserError, match="is open already"), inner:
        pass
    with distbench.communication(model) as seen:
        model(x).sum().backward()
    assert seen.count("reduce_scatter", on="dp_shard") == 1
    wrong: Any = "model"
    with pytest.raises(distbench.UserError, match="not str; give the model"), distbench.communication(wrong):
        pass
