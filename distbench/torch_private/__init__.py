"""The one package with private or experimental torch names, each probed before it is used.

What needs a name that is missing raises `Unsupported` with the reason, and so the case that asked for it is
recorded.
"""

from distbench.torch_private.collective_dispatch_mode import (
    FAMILIES,
    NAMESPACES,
    OTHERS,
    PEERS,
    CollectiveCall,
    arguments_of,
    call_of,
    each_collective,
    each_operator,
    is_async,
    is_attention,
    is_compiled,
    is_pending,
    keep_compiled_graphs_apart,
    keep_gradients_of_pending_inputs,
    kind_of,
    loses_gradients_of_pending_inputs,
    no_collectives,
    tensors_in,
    waited_for,
    written_by,
)
from distbench.torch_private.collective_kernels import Issued, nothing_sent, timed_collectives
from distbench.torch_private.context_parallel import context_parallel, require_kernel, whole_sequence
from distbench.torch_private.fake_tensors import (
    EndedWork,
    NeedsValues,
    ShapesOnly,
    chunks_when_asked_for,
    global_metadata,
    has_values,
    meshes_with_values,
    reducers_on_host,
    simulated_device,
    waited_for_when_used,
    with_values_again,
)
from distbench.torch_private.fsdp import (
    Label,
    Labels,
    Message,
    autograd_position,
    divide_factors,
    finished_parameter,
    forget_step,
    labelled_communication,
    messages_of_stages,
    next_autograd_position,
    reduction_dtype,
    sum_then_divide,
    unit_policies,
    vote_on_fake_group,
)
from distbench.torch_private.memory import (
    Allocation,
    Block,
    LiveStorages,
    cpu_allocations,
    peak_of_live_tensors,
    storages_of,
)
from distbench.torch_private.mesh import (
    BACKEND_OPS,
    async_tp_options,
    backend_class,
    fake_mesh,
    fake_ranks,
    flatten_mesh,
    forget_layouts,
    forget_layouts_of_backward,
    hooked_parameters,
    hybrid_mesh,
    is_strided_shard,
    on_spmd_mesh,
    ranks_by_group_name,
    replicate_by_unit,
    replicate_in_buckets,
    steps_until_buckets_stay,
    strided_shard,
)
from distbench.torch_private.planners import (
    OrderedPlacements,
    OrderedTensor,
    OwnPlans,
    PathStep,
    clear_redistribution_caches,
    partition,
    path_between,
    plan_only,
    plan_path,
    planner,
    remembered_steps,
)
from distbench.torch_private.probe import (
    PENDING,
    SHARDED_INDICES,
    V_SCHEDULES,
    ZERO_FILLS,
    Internal,
    Probe,
    Skipped,
    Unsupported,
    bind_to_numa_node,
    compiler_errors,
    import_compiler,
    lacks,
    needs_newer,
    probe,
    replaced,
    require,
)
from distbench.torch_private.profile_planner import calibrated_planning
from distbench.torch_private.redistribute import native_all_to_all
