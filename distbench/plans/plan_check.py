"""All problems of a plan, reported together, found on the meta device before anything is measured."""

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distbench.plans.batch import Batch
from distbench.plans.fsdp import is_function, policies_of, present, setter_arguments
from distbench.plans.model import name_of, tensors_of
from distbench.plans.module_patterns import (
    AUTO,
    annotations_by_parameter,
    is_of_transformers,
    matching_modules,
    own_units,
    styles_by_module,
    tp_patterns,
)
from distbench.plans.parallelize import known_backends
from distbench.plans.pipeline import check_split, is_in_config, num_layers, schedule_parameters, stage_of
from distbench.ranks.context import RankContext
from distbench.spec import FsdpPlan, LargestDim, ParallelPlan, ShardParam, UserError
from distbench.spec.errors import nearest
from distbench.spec.mesh import BATCH_DIMS, MESH_DIMS
from distbench.spec.plan import ATTENTION_KERNELS, ROTATIONS, SCHEDULES, PipelinePlan, folded, matching
from distbench.spec.printable_text import count_text, listed
from distbench.torch_private import needs_newer

# The largest number of sizes, and of names, in a message.
LARGEST_SIZE, MAX_NAMED = 64, 12
# Name of a module or parameter with a layer number in it.
_IN_LAYER = re.compile(r"(?<![\w.])(?:\w+\.)*\d+(?:\.\w+)*(?![\w.])")
_LETTER = re.compile(r"[^\W\d]")
SHARDING_STYLES = ("ColwiseParallel", "RowwiseParallel")
# Projections of transformers models that are sharded by whole heads, and the config field with the number of heads.
HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads"}
# Styles that torch lacks, or that leave plain parameters among the DTensors of one mesh.
NOT_ON_SPMD_MESH = ("gather_extension", "whole", "ignored", "unit_mesh_dims")
# Parameters of DistributedDataParallel that other fields set, or that torch's `replicate` does not pass on.
DDP_FIELDS = {
    **{name: f"DdpPlan.{name}" for name in ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph")},
    **{"find_unused_parameters": "DdpPlan.find_unused_parameters", "module": "ParallelPlan.ddp"},
    **dict.fromkeys(("process_group", "device_mesh", "device_ids", "output_device", "dim"), "DdpPlan.mesh_dims"),
}


@dataclass(frozen=True)
class Undivided:
    """Problem that mesh dims do not shard a tensor dim or a batch evenly."""

    what: str  # first half of the message, such as "parameter w of shape [3, 4] cannot be sharded on ..."
    where: str  # the mesh dims with their size
    number: int  # the number that the mesh dims do not divide
    size: int  # ranks along them
    name: str  # the parameter's name, or empty

    def __str__(self) -> str:
        return f"{self.what} over {self.where}: {self.number} is not a multiple of {self.size} ({self._works})"

    @property
    def _works(self) -> str:
        sizes = range(1, min(self.number, LARGEST_SIZE) + 1)
        return "sizes that work: " + ", ".join(str(size) for size in sizes if self.number % size == 0)

    @property
    def reason(self) -> str:
        """Part of the message that parameters with the same problem share."""
        return f"{self.where} does not divide {self.number} ({self._works})"


def undivided(what: str, number: int, mesh_dims: Sequence[str], context: RankContext, name: str = "") -> Undivided:
    """Return the problem that mesh dims cannot evenly shard a tensor dim (or batch) of `number`, in a text after
    `what`.
    """
    _, size = context.index(tuple(mesh_dims))
    return Undivided(what, f"mesh dim {'x'.join(mesh_dims)!r} of size {size}", number, size, name)


def _undivided_parameter(
    name: str, parameter: torch.Tensor, tensor_dim: int, cannot: str, mesh_dims: Sequence[str], context: RankContext
) -> Iterator[Undivided]:
    length = parameter.shape[tensor_dim] if parameter.ndim else 1
    if length % context.index(tuple(mesh_dims))[1]:
        yield undivided(f"parameter {name} of shape {list(parameter.shape)} {cannot}", length, mesh_dims, context, name)


def grouped(problems: Iterable[str | Undivided]) -> list[str]:
    """Merge problems to one sentence for all parameters with one reason, and for all layers with one problem."""
    by_reason: dict[str, list[str | Undivided]] = {}
    for problem in problems:
        if isinstance(problem, Undivided) and problem.name:
            reason = problem.reason
        else:
            # A number such as 0.5 is not a name.
            reason = _IN_LAYER.sub(lambda name: folded(name[0]) if _LETTER.search(name[0]) else name[0], str(problem))
        by_reason.setdefault(reason, []).append(problem)
    sentences = []
    for reason, of_reason in by_reason.items():
        names = [problem.name for problem in of_reason if isinstance(problem, Undivided)]
        if len(of_reason) == 1:
            sentences.append(str(of_reason[0]))
        elif any(names):
            sentences.append(f"{reason}, as required by {listed(_listed(names), MAX_NAMED, '; ', '; {} more')}")
        else:
            sentences.append(f"{reason}: {len(of_reason)} layers")
    return sentences


def _listed(names: Sequence[str]) -> list[str]:
    """Return a text such as `layers.*.attention.{wq,wk}.weight: 8 layers`, with the number of layers, and the modules
    of one layer joined to one name.
    """
    beside: dict[tuple[str, str, int], list[str]] = {}
    for name, count in Counter(map(folded, names)).items():
        module, _, parameter = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        beside.setdefault((parent, parameter, count), []).append(last)
    texts = []
    for (parent, parameter, count), lasts in beside.items():
        module = lasts[0] if len(lasts) == 1 else f"{{{','.join(lasts)}}}"
        name = ".".join(filter(None, (parent, module, parameter)))
        texts.append(name if count == 1 else f"{name}: {count} layers")
    return texts


def _tp_problems(model: nn.Module, plan: ParallelPlan, context: RankContext) -> Iterator[str | Undivided]:
    yield from _styles(model, plan, context)
    yield from _undivided_heads(model, plan, context)
    yield from _annotations(model, plan, context)
    if plan.loss_parallel and plan.tp is None:
        yield "loss parallel needs a TP plan whose last module's output is sharded over the vocabulary"


def _styles(model: nn.Module, plan: ParallelPlan, context: RankContext) -> Iterator[str | Undivided]:
    for pattern, name, module, style in styles_by_module(plan, model):
        kind = _kind(style)
        if kind in SHARDING_STYLES and not isinstance(module, nn.Linear | nn.Embedding):
            module_text = f"{name or 'the root'} is a {type(module).__name__}"
            yield f"TP pattern {pattern!r}: {kind} shards Linear and Embedding, but {module_text}"
            continue
        for attribute, tensor_dim in _sharded_by(style, module):
            cannot = f"cannot be sharded on tensor dim {tensor_dim}"
            parameter, tp_dims = getattr(module, attribute), present(plan.tp_dims, context)
            yield from _undivided_parameter(_join(name, attribute), parameter, tensor_dim, cannot, tp_dims, context)


def _undivided_heads(model: nn.Module, plan: ParallelPlan, context: RankContext) -> Iterator[Undivided]:
    """Yield head counts that tensor parallel does not divide; shards may have any length, but not parts of heads."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    colwise = [pattern for pattern, style in tp_patterns(plan, model).items() if style == "colwise"]
    dims = present(plan.tp_dims, context)
    for field in sorted({HEADS[last] for pattern in colwise if (last := pattern.rpartition(".")[2]) in HEADS}):
        heads = getattr(config, field, None)
        if isinstance(heads, int) and heads % context.index(plan.tp_dims)[1]:
            yield undivided(f"{field}={heads} of {type(config).__name__} cannot be split", heads, dims, context)


def _kind(style: Any) -> str:
    """Return torch's name of a style; transformers' styles accept more module types and unequal shards."""
    return "" if is_of_transformers(style) else type(style).__name__


def _join(module: str, attribute: str) -> str:
    return f"{module}.{attribute}" if module else attribute


def _sharded_by(style: Any, module: nn.Module) -> Iterator[tuple[str, int]]:
    kind, is_embedding = _kind(style), isinstance(module, nn.Embedding)
    if kind in SHARDING_STYLES:
        yield "weight", int(is_embedding if kind == "ColwiseParallel" else not is_embedding)
    if kind == "ColwiseParallel" and getattr(module, "bias", None) is not None:
        yield "bias", 0


def _annotations(model: nn.Module, plan: ParallelPlan, context: RankContext) -> Iterator[str | Undivided]:
    parameters = dict(model.named_parameters())
    styled = {
        _join(name, attribute)
        for _, name, module, style in styles_by_module(plan, model)
        for attribute, _ in _sharded_by(style, module)
    }
    for name, annotations in annotations_by_parameter(plan, model).items():
        shape = list(parameters[name].shape)
        over: dict[int, list[str]] = {}
        seen_dims: list[str] = []
        for annotation in annotations:
            yield from _bad_annotation(name, shape, annotation, seen_dims, plan, context)
            seen_dims += annotation.mesh_dims
            over.setdefault(annotation.tensor_dim, []).extend(annotation.mesh_dims)
        for tensor_dim, mesh_dims in over.items():
            if 0 <= tensor_dim < len(shape):
                ordered = [mesh_dim for mesh_dim in context.mesh_dims if mesh_dim in mesh_dims]
                cannot = f"cannot be sharded on tensor dim {tensor_dim}"
                yield from _undivided_parameter(name, parameters[name], tensor_dim, cannot, ordered, context)
        if name in styled:
            yield f"parameter {name} is sharded by a TP style and by shard_params; remove one of them"


def _bad_annotation(
    name: str, shape: list[int], annotation: ShardParam, seen_dims: list[str], plan: ParallelPlan, context: RankContext
) -> Iterator[str]:
    if not 0 <= annotation.tensor_dim < len(shape):
        yield f"parameter {name} of shape {shape} has no tensor dim {annotation.tensor_dim}; use 0 to {len(shape) - 1}"
    for mesh_dim in annotation.mesh_dims:
        if mesh_dim in seen_dims:
            yield f"shard_params shards parameter {name} over mesh dim {mesh_dim!r} twice; name each mesh dim once"
        if mesh_dim in BATCH_DIMS:
            yield f"shard_params cannot use mesh dim {mesh_dim!r}, whose ranks have different data; use FSDP there"
        elif mesh_dim not in plan.tp_dims or mesh_dim not in context.mesh_dims:
            usable = ", ".join(present(plan.tp_dims, context)) or "none"
            yield f"shard_params shards over mesh dim {mesh_dim!r}; use mesh dims of tp_dim that the mesh has: {usable}"


def fsdp_problems(model: nn.Module, plan: ParallelPlan, context: RankContext) -> Iterator[str | Undivided]:
    """Yield one sentence per problem of the plan's FSDP part, if any."""
    fsdp = plan.fsdp
    if fsdp is None:
        return
    if not present(fsdp.mesh_dims or fsdp.replicate_dims, context):
        over = f"shards over {', '.join(fsdp.mesh_dims)}" if fsdp.mesh_dims else "has no mesh_dims to shard over"
        yield f"FSDP {over}, but the mesh has only {', '.join(context.mesh_dims)}"
        return
    if shared_dims := sorted(set(fsdp.mesh_dims) & set(fsdp.replicate_dims)):
        shared = f"FSDP shards and replicates over mesh dim {shared_dims[0]!r}"
        yield f"{shared}; leave this mesh dim out of mesh_dims or replicate_dims"
    for pattern, mesh_dims in fsdp.unit_mesh_dims.items():
        if not present(mesh_dims, context):
            over, known_dims = ", ".join(mesh_dims) or "nothing", ", ".join(context.mesh_dims)
            yield f"unit_mesh_dims shards {pattern!r} over {over}, but the mesh has only {known_dims}"
    yield from _scalars(model, fsdp)
    yield from _setters(fsdp)
    is_small = isinstance(fsdp.shard_placement, LargestDim) and fsdp.shard_placement.min_numel > 0
    if is_small or fsdp.whole:
        whole_text = (
            "parameters that LargestDim(min_numel=...) keeps whole" if is_small else "parameters in FSDP's whole"
        )
        if fsdp.offload is not None:
            yield f"CPU offload does not reach {whole_text}; leave one of them out"
        if any(policy.param_dtype is not None for policy in policies_of(fsdp)):
            yield f"mixed precision does not cast {whole_text}; leave one of them out"
    if fsdp.spmd_mesh:
        parts = [name for name in ("ep", "cp", "pipeline") if getattr(plan, name)]
        parts += [f"FsdpPlan.{name}" for name in fsdp.changed_fields() if name in NOT_ON_SPMD_MESH]
        parts += ["set_all_reduce_hook"] if "set_all_reduce_hook" in fsdp.configure else []
        parts += ["LargestDim.min_numel"] if is_small else []
        parts += [] if fsdp.mesh_dims else ["FsdpPlan.replicate_dims alone"]
        if parts:
            yield f"spmd_mesh cannot be combined with {', '.join(parts)}; leave one of them out"
    if fsdp.gather_extension is not None:
        # An extension would fail only on ranks with shorter shards, and the other ranks would wait for them.
        cannot, shards = "has no equal shards for a gather_extension", present(fsdp.mesh_dims, context)
        matrices = [(name, parameter) for name, parameter in model.named_parameters() if parameter.ndim > 1]
        for name, parameter in matrices:
            yield from _undivided_parameter(name, parameter, 0, cannot, shards, context)


def _scalars(model: nn.Module, fsdp: FsdpPlan) -> Iterator[str]:
    scalars = [name for name, parameter in model.named_parameters() if not parameter.ndim]
    left_out = {name for pattern in (*fsdp.whole, *fsdp.ignored) for name in matching(pattern, scalars)}
    for name in scalars:
        if name not in left_out:
            yield f"parameter {name} is a scalar, which fully_shard does not accept; add {name} to FsdpPlan(whole=...)"


def _setters(fsdp: FsdpPlan) -> Iterator[str]:
    from torch.distributed.fsdp import FSDPModule

    setters = {name: method for name, method in vars(FSDPModule).items() if name.startswith("set_")}
    for name, value in fsdp.configure.items():
        if name not in setters:
            yield from _unknown_option("FsdpPlan.configure", name, setters)
        elif not is_function(value):
            signature, (args, kwargs) = inspect.signature(setters[name]), setter_arguments(value)
            try:
                signature.bind(None, *args, **kwargs)
            except TypeError as error:
                yield f"FsdpPlan.configure[{name!r}]: {error}; torch's {name} accepts {signature}"


def _unknown_option(where: str, name: str, allowed: Iterable[str]) -> Iterator[str]:
    """Yield a sentence; none for an option of a newer torch, whose cases are unsupported."""
    if not needs_newer(name):
        yield f"{where}: torch {torch.__version__} has no option {name!r}; use {', '.join(allowed)}"


def _ddp_problems(model: nn.Module, plan: ParallelPlan, context: RankContext) -> Iterator[str]:
    ddp = plan.ddp
    if ddp is None:
        return
    if not present(ddp.mesh_dims, context):
        yield f"DDP replicates over {', '.join(ddp.mesh_dims)}, but the mesh has only {', '.join(context.mesh_dims)}"
    if plan.fsdp is not None:
        yield "ddp and fsdp both reduce gradients; for both at once use FsdpPlan(replicate_dims=...)"
    if plan.tp is not None or plan.shard_params or plan.ep:
        instead = "use FsdpPlan(mesh_dims=(), replicate_dims=...)"
        yield f"ddp averages plain parameters, but tp, ep and shard_params make DTensors; {instead}"
    if ddp.bucket_cap_mb is not None and not ddp.bucket_cap_mb > 0:
        yield f"bucket_cap_mb={ddp.bucket_cap_mb} is not a valid bucket size; use more than 0"
    sizes = ddp.configure.get("bucket_cap_mb_list")
    is_list = isinstance(sizes, Sequence) and not isinstance(sizes, str)
    if sizes is not None and not (is_list and all(isinstance(size, int | float) and size > 0 for size in sizes)):
        yield f"bucket_cap_mb_list={sizes!r} is not a valid list of bucket sizes; use numbers of MiB, such as [1, 25]"
    if others := [name for name in ddp.configure if name in DDP_FIELDS]:
        yield f"DdpPlan.configure has {others[0]!r}; use the field of the plan, {DDP_FIELDS[others[0]]}"
    allowed = sorted(set(inspect.signature(DistributedDataParallel).parameters) - set(DDP_FIELDS))
    for name in ddp.configure:
        if name not in (*allowed, *others):
            yield from _unknown_option("DdpPlan.configure", name, allowed)
    if ddp.static_graph and not ddp.sync_each_microbatch and plan.microbatches > 1:
        yield "static_graph needs the first backward, which sync_each_microbatch=False skips; leave one of them out"
    modules = matching_modules(ddp.ignored, model).values()
    ignored = {parameter for module in modules for parameter in module.parameters()}
    if not any(parameter.requires_grad and parameter not in ignored for parameter in model.parameters()):
        clause = "that it does not ignore " if ignored else ""
        yield f"ddp has nothing to average: no parameter of the model {clause}requires a gradient"


def _expert_problems(model: nn.Module, plan: ParallelPlan, context: RankContext) -> Iterator[str | Undivided]:
    if not plan.ep:
        return
    ep_dims, fsdp = present(plan.ep_dims, context), plan.fsdp
    if not ep_dims:
        over = " or ".join(map(repr, plan.ep_dims))
        yield f"expert parallel needs mesh dim {over}, but the mesh has only {', '.join(context.mesh_dims)}"
        return
    if plan.ep_tp_dim in (*plan.ep_dims, *BATCH_DIMS):
        differ = "tokens" if plan.ep_tp_dim in BATCH_DIMS else "experts"
        why = f"whose ranks have different {differ}; use the mesh dim of tensor parallel"
        yield f"ep_tp_dim={plan.ep_tp_dim!r} shards each expert over a mesh dim {why}"
        return
    summed = (*fsdp.mesh_dims, *fsdp.replicate_dims) if fsdp else ()
    alone_in = [name for name in ep_dims if name in BATCH_DIMS and name not in summed]
    if plan.ddp is None and alone_in:
        where = f"ranks along {alone_in[0]!r} have different data"
        yield f"{where} but do not sum gradients of other parameters; add this mesh dim to FSDP's mesh_dims"
    unit_dims = (fsdp.unit_mesh_dims if fsdp else {}).items()
    alone = set(matching_modules({pattern: dims for pattern, dims in unit_dims if not {*ep_dims} & {*dims}}, model))
    for name, module in matching_modules(plan.ep, model).items():
        if fsdp is not None and name not in alone and {*ep_dims} & {*summed}:
            over = "x".join(ep_dims)
            yield f"FSDP shards {name} over {over!r} like expert parallel; set other mesh dims in unit_mesh_dims"
        for attribute, parameter in module.named_parameters(name):
            yield from _undivided_parameter(attribute, parameter, 0, "cannot be sharded by experts", ep_dims, context)


def _pipeline_problems(model: nn.Module, plan: ParallelPlan, context: RankContext) -> Iterator[str]:
    pipeline = plan.pipeline
    if pipeline is None:
        return
    if pipeline.schedule not in SCHEDULES:
        yield f"pipeline schedule {pipeline.schedule!r} is unknown; use {', '.join(SCHEDULES)}"
        return
    if pipeline.mesh_dim not in context.mesh_dims:
        yield f"a pipeline needs mesh dim {pipeline.mesh_dim!r}, but the mesh has {', '.join(context.mesh_dims)}"
        return
    size = context.size(pipeline.mesh_dim)
    problems = [*_parts_that_do_not_fit(plan), *_stages(pipeline, size)]
    yield from problems
    for mesh_dim in pipeline.activation_shards:
        if mesh_dim not in (*context.mesh_dims, *plan.tp_dims):
            yield f"activation_shards has mesh dim {mesh_dim!r}, but the mesh has {', '.join(context.mesh_dims)}"
    parameters = schedule_parameters(pipeline.schedule)
    for name in pipeline.configure:
        if name not in parameters and not is_in_config(name):
            yield from _unknown_option("PipelinePlan.configure", name, parameters)
    if not problems:
        yield from _split(model, pipeline, size)


def _parts_that_do_not_fit(plan: ParallelPlan) -> Iterator[str]:
    pipeline = plan.pipeline
    assert pipeline is not None
    parts = {
        "ddp": (plan.ddp, "use FsdpPlan, whose gradients torch's stages reduce once per step"),
        "cp": (plan.cp, "leave one of them out"),
        "ep": (plan.ep, "leave one of them out"),
        "loss_parallel": (plan.loss_parallel, "have the last stage return whole logits"),
        "state_dict": (plan.state_dict, "leave state_dict out"),
        "FsdpPlan.whole": (plan.fsdp is not None and plan.fsdp.whole, "leave FsdpPlan.whole out"),
        "FsdpPlan.offload": (plan.fsdp is not None and plan.fsdp.offload, "leave FsdpPlan.offload out"),
    }
    for name, (part, instead) in parts.items():
        if part:
            yield f"a pipeline cannot be combined with {name}; {instead}"
    # torch's stage_backward_input searches module.parameters() for the weights, which differ from those that forward
    # used once FSDP2 has freed them.
    splits = SCHEDULES[pipeline.schedule].splits_backward
    if plan.fsdp is not None and splits and plan.fsdp.reshard_after_forward is not False:
        less = f"schedule {pipeline.schedule} splits backward, which loses gradients of parameters that FSDP2 frees"
        yield f"{less} after forward; use FsdpPlan(reshard_after_forward=False), 1f1b or interleaved_1f1b"
    if plan.compile is not None and splits:
        yield f"torch does not compile stages of schedule {pipeline.schedule}, whose backward is in parts; use 1f1b"


def _stages(pipeline: PipelinePlan, size: int) -> Iterator[str]:
    schedule, count = SCHEDULES[pipeline.schedule], pipeline.stages_of_a_rank
    if count < 1 or (schedule.is_fixed and count != schedule.stages_per_rank):
        must = count_text(schedule.stages_per_rank, "stage") if schedule.is_fixed else "1 stage or more"
        yield f"schedule {pipeline.schedule} has {must} per rank, not {count}; leave stages_per_rank out"
    num_boundaries = size * count - 1
    if pipeline.first_layers and (
        len(pipeline.first_layers) != num_boundaries
        or list(pipeline.first_layers) != sorted({*pipeline.first_layers, 0} - {0})
    ):
        layers = list(pipeline.first_layers)
        allowed = f"{num_boundaries} ascending layers, the first layers of stages 1 to {num_boundaries}"
        yield f"first_layers={layers} must be {allowed}"


def _split(model: nn.Module, pipeline: PipelinePlan, size: int) -> Iterator[str]:
    num_stages = size * pipeline.stages_of_a_rank
    if pipeline.split is None:
        layer_count = num_layers(model)
        if not layer_count:
            yield "a pipeline splits a ModuleList or ModuleDict, which the model lacks; give PipelinePlan(split=...)"
            return
        last = max(pipeline.first_layers, default=0)
        if layer_count < num_stages or last >= layer_count:
            more = f", stage {num_stages - 1} begins with layer {last}" if last >= layer_count else ""
            yield (
                f"{count_text(layer_count, 'layer')} cannot be split into "
                f"{count_text(num_stages, 'stage')}{more}; use more layers, or fewer stages"
            )
            return
    try:
        check_split(model, [stage_of(model, pipeline, stage, num_stages) for stage in range(num_stages)])
    except UserError as error:
        yield str(error)


def problems(model: nn.Module, batch: Any, plan: ParallelPlan, context: RankContext) -> list[str]:
    """Return one sentence per problem that keeps the plan from working on a model on the meta device and this mesh.

    `batch` is the global batch, as a `Batch` or its tree.
    """
    batch = batch if isinstance(batch, Batch) else Batch(batch)
    try:
        return grouped(
            [
                *_unused_mesh_dims(plan, context),
                *_unmatched_patterns(model, plan),
                *_tp_problems(model, plan, context),
                *fsdp_problems(model, plan, context),
                *_ddp_problems(model, plan, context),
                *_expert_problems(model, plan, context),
                *_undividable_batch(batch, plan, context),
                *_context_parallel(model, batch, plan, context),
                *_compile_problems(plan),
                *_sparse_gradients(model),
                *_pipeline_problems(model, plan, context),
            ]
        )
    except UserError as error:  # an unknown name prevents the other checks
        return [str(error)]


def _unused_mesh_dims(plan: ParallelPlan, context: RankContext) -> Iterator[str]:
    used = {*plan.fsdp.mesh_dims, *plan.fsdp.replicate_dims} if plan.fsdp else set()
    used |= set(plan.tp_dims) if plan.tp is not None or plan.shard_params else set()
    used |= {plan.cp.mesh_dim} if plan.cp else set()
    used |= set(plan.ddp.mesh_dims) if plan.ddp else set()
    used |= {*plan.ep_dims, *([plan.ep_tp_dim] if plan.ep_tp_dim else [])} if plan.ep else set()
    used |= {plan.pipeline.mesh_dim} if plan.pipeline else set()
    # The user's function may use any mesh dim; the mesh dim's name determines how the batch is split along it.
    uses_any = callable(plan.tp) and plan.tp_dim == "tp"
    for name in context.mesh_dims:
        if uses_any and name not in MESH_DIMS:
            yield (
                f"the name of mesh dim {name!r} does not define whether its ranks have different data; use one of "
                f"{', '.join(MESH_DIMS)} (ranks along {' and '.join(BATCH_DIMS)} get different parts of the batch)"
            )
        if not uses_any and name not in used and context.size(name) > 1:
            only = f", only {', '.join(sorted(used))}" if used else ""
            advice = "; add fsdp=FsdpPlan()" if name == "dp_shard" and plan.fsdp is None else ""
            yield f"the plan does not use mesh dim {name!r} (size {context.size(name)}){only}{advice}"


def _unmatched_patterns(model: nn.Module, plan: ParallelPlan) -> Iterator[str]:
    modules = [name for name, _ in model.named_modules() if name]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    fsdp, styled = plan.fsdp, tp_patterns(plan, model)
    for pattern in styled if plan.tp != AUTO else ():
        if not matching(pattern, [*modules, "", *(parameters if isinstance(styled[pattern], str) else ())]):
            yield f"TP pattern {pattern!r} matches no module ({nearest(pattern, modules)})"
    if fsdp is not None and fsdp.wrap == AUTO:
        own_units(model)  # UserError if the model lists no units
    groups: tuple[tuple[str, str, Iterable[str]], ...] = (
        ("checkpoint", "module", plan.checkpoint),
        ("compile", "module", plan.compile.modules if plan.compile else ()),
        ("FSDP", "module", fsdp.wrap if fsdp and fsdp.wrap != AUTO else ()),
        ("unit_mesh_dims", "module", fsdp.unit_mesh_dims if fsdp else ()),
        ("DDP's ignored", "module", plan.ddp.ignored if plan.ddp else ()),
        ("EP", "module", plan.ep),
        ("shard_params", "parameter", plan.shard_params),
        ("FSDP's whole", "parameter", fsdp.whole if fsdp else ()),
        ("FSDP's ignored", "parameter", fsdp.ignored if fsdp else ()),
    )
    for option, kind, patterns in groups:
        names = modules if kind == "module" else parameters
        for pattern in patterns:
            if not matching(pattern, [*modules, ""] if kind == "module" else parameters):
                yield f"{option} pattern {pattern!r} matches no {kind} ({nearest(pattern, names)})"


def _undividable_batch(batch: Batch, plan: ParallelPlan, context: RankContext) -> Iterator[str | Undivided]:
    _, num_parts = context.index(BATCH_DIMS)
    tensors = dict(tensors_of(batch.tree))
    lengths: dict[int, str] = {}
    for name, tensor_dim in batch.split_dims.items():
        lengths.setdefault(tensors[name].shape[tensor_dim], name)
    for length, name in lengths.items():
        detail = ", ".join(filter(None, (name if len(lengths) > 1 else "", batch.place)))
        if length % num_parts:
            problem = f"a batch of {length}{f' ({detail})' if detail else ''} cannot be split"
            dims = [dim for dim in context.mesh_dims if dim in BATCH_DIMS]
            yield f"{undivided(problem, length, dims, context)}{batch.guessed()}"
        elif plan.microbatches < 1 or length % (num_parts * plan.microbatches):
            share = length // num_parts
            parts = f"{plan.microbatches} micro-batches; use a divisor of {share}"
            yield f"a batch of {share} per rank cannot be split into {parts}"


def _context_parallel(model: nn.Module, batch: Batch, plan: ParallelPlan, context: RankContext) -> Iterator[str]:
    if plan.cp is None:
        return
    if plan.cp.rotate not in ROTATIONS:
        yield f"rotation {plan.cp.rotate!r} is unknown; use {', '.join(ROTATIONS)}"
    if plan.cp.kernel is not None and plan.cp.kernel not in ATTENTION_KERNELS:
        yield f"attention kernel {plan.cp.kernel!r} is unknown; use {', '.join(ATTENTION_KERNELS)} or None"
    if plan.cp.unshard_output and plan.loss_parallel:
        yield "unshard_output gathers plain tensors, but loss parallel returns a DTensor; remove one of them"
    if plan.cp.unshard_output and plan.cp.seq_dim < 1:
        yield f"unshard_output requires the batch in tensor dim 0, so seq_dim={plan.cp.seq_dim} is not the sequence"
    buffers = [name for name, _ in model.named_buffers()]
    for name in plan.cp.buffers:
        if name not in buffers:
            yield f"context parallel buffer {name!r} is not a buffer of the model ({nearest(name, buffers)})"
    if plan.cp.mesh_dim not in context.mesh_dims:
        yield f"context parallel needs mesh dim {plan.cp.mesh_dim!r}, but the mesh has {', '.join(context.mesh_dims)}"
        return
    size = context.size(plan.cp.mesh_dim)
    if size > 1:
        yield from _unexchanged_attention(model)
    chunks = size * 2 if plan.cp.balances else size
    sequences = batch.sequence_dims_of(plan.cp)
    over = f"mesh dim {plan.cp.mesh_dim!r} of size {size}"
    if not sequences:
        yield f"no tensor of the batch has a tensor dim {plan.cp.seq_dim} to be split over {over}; set sequence_dims"
    tensors = dict(tensors_of(batch.tree))
    for length in dict.fromkeys(tensors[name].shape[tensor_dim] for name, tensor_dim in sequences.items()):
        if size > 1 and length % chunks:
            unbalanced = "" if length % size else ", or load_balance=False, because torch balances no other length"
            works = f"use a multiple of {chunks}{unbalanced}" if length > 1 else "leave cp out for one token"
            yield f"a sequence of {length} cannot be split into {chunks} chunks over {over}; {works}"


def _unexchanged_attention(model: nn.Module) -> Iterator[str]:
    """Report a transformers model whose attention does not call the function that context parallel replaces, such as a
    model with attention sinks.
    """
    for module in model.modules():
        used = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if isinstance(used, str) and used != "sdpa":
            yield (
                "context parallel exchanges keys and values only in scaled_dot_product_attention, and "
                f"{name_of(module)} has attn_implementation={used!r}, which would see one rank's part of the "
                f"sequence; use attn_implementation='sdpa', or leave cp out if the model rejects 'sdpa', as models "
                f"with attention sinks do"
            )
            return


def _compile_problems(plan: ParallelPlan) -> Iterator[str]:
    compiled = plan.compile
    if compiled is not None and compiled.async_tp and (plan.tp is None or compiled.backend != "inductor"):
        yield "async_tp is inductor's overlap of TP collectives; give a TP plan and backend='inductor'"
    if compiled is not None and compiled.backend not in known_backends():
        yield f"compile backend {compiled.backend!r} is unknown; use {', '.join(known_backends())}"


def _sparse_gradients(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            kind = f"{name or 'the root'} ({type(module).__name__})"
            yield f"{kind} has sparse gradients, which neither FSDP2 nor the checks support; use sparse=False"
