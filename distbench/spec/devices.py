"""The types of device that ranks compute on, without torch; what torch does with each is in ranks/device.py.

torch knows ROCm's devices by CUDA's name, and so do we: which of the two drives them, torch's build says.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Lister:
    """A command that lists this host's devices on lines that begin with `line`, and below each, indented, its parts on
    lines that begin with `part`."""

    command: tuple[str, ...]
    line: str
    part: str = ""


@dataclass(frozen=True)
class DeviceType:
    """One type of device.

    Args:
        backend: moves its tensors; torch's own word counts where it has one.
        per_host: how many a host usually has, for prices of groups that nobody has measured.
        scales_sums: whether its backend multiplies while it adds (NCCL's ncclRedOpCreatePreMulSum).
        waits_on_host: whether a collective ends where the host waits for it; elsewhere it ends on a stream.
        variables: environment variables that change what is measured, for the run file's header.
        families: beginnings of further ones: libraries get new ones with each version.
        visible: environment variables that list the devices a process may use.
        listers: commands that count them, the first that is installed.
        files: patterns of files, one per device, where there is no lister; a file that holds "0" does not count.
        brought_by: packages, or endings of torch's version, without one of which torch has no such device; torch then
            counts them where there are no `listers` and `files`.
        drivers: what torch must be built for, where that is not its name alone.
    """

    backend: str
    per_host: int = 1
    scales_sums: bool = False
    waits_on_host: bool = False
    variables: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    visible: tuple[str, ...] = ()
    listers: tuple[Lister, ...] = ()
    files: tuple[str, ...] = ()
    brought_by: tuple[str, ...] = ()
    drivers: str = ""


# By torch's name, which is also what --device takes.
DEVICES = {
    "cpu": DeviceType("gloo", waits_on_host=True, variables=("GLOO_SOCKET_IFNAME",)),
    "cuda": DeviceType(
        "nccl",
        per_host=8,
        scales_sums=True,
        variables=(
            *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS"),
            *("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_ORDER", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
            *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "HIPBLASLT_ALLOW_TF32"),
        ),
        families=("NCCL_", "TORCH_NCCL_", "RCCL_", "MSCCLPP_", "HSA_", "UCX_", "FI_"),
        visible=("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        listers=(Lister(("nvidia-smi", "--list-gpus"), "GPU ", "MIG "),),
        # The driver of AMD's numbers CPUs too; those have no id.
        files=("dev/nvidia[0-9]*", "sys/class/kfd/kfd/topology/nodes/*/gpu_id"),
        drivers="CUDA or ROCm",
    ),
    "xpu": DeviceType("xccl", families=("ZE_", "CCL_", "SYCL_", "ONEAPI_"), brought_by=("+xpu",)),
    "npu": DeviceType(
        "hccl",
        variables=("ASCEND_RT_VISIBLE_DEVICES", "PYTORCH_NPU_ALLOC_CONF"),
        families=("HCCL_",),
        visible=("ASCEND_RT_VISIBLE_DEVICES",),
        files=("dev/davinci[0-9]*",),
        brought_by=("torch_npu",),
    ),
    "hpu": DeviceType(
        "hccl", variables=("HABANA_VISIBLE_MODULES",), families=("HCCL_", "PT_HPU_"), brought_by=("habana_frameworks",)
    ),
    "mtia": DeviceType("mtia", brought_by=("mtia",)),
}
# What switches something off that makes collectives fast, or makes every launch wait.
SWITCHED_OFF = {
    **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "CUDA_LAUNCH_BLOCKING"), "1"),
    **dict.fromkeys(("NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE"), "0"),
    "NCCL_P2P_LEVEL": "LOC",
}
# Names one of torchrun's ways to bind ranks to the CPUs near their device: node, socket, exclusive, core-complex.
NUMA_BINDING = "DISTBENCH_NUMA_BINDING"
ACCELERATORS = tuple(name for name in DEVICES if name != "cpu")
ANY_ACCELERATOR = f"{', '.join(ACCELERATORS[:-1])} or {ACCELERATORS[-1]}"  # for a sentence
# Fields of a run file's header that hold the versions of what drives accelerators.
DRIVER_FIELDS = ("nccl", "cuda", "hip", "driver")
DEVICE_HELP = "Default: the accelerator that is here, else cpu."


def known_device(name: str) -> DeviceType:
    """Return the entry of a type of device; one that is not listed is an accelerator without properties."""
    return DEVICES.get(name) or DeviceType("")


def built_for(name: str) -> str:
    """Return what torch must be built for to have such a device, in words."""
    return known_device(name).drivers or name.upper()


def is_accelerator(name: str) -> bool:
    """Return whether a type of device is not the CPU."""
    return name != "cpu"


def backend_for(device: str, backend: str = "") -> str:
    """Return the default group's backend for torch, with gloo for tensors on the CPU."""
    backend = backend or known_device(device).backend
    return f"cpu:gloo,{device}:{backend}" if is_accelerator(device) else backend


def first_backend_class(backend: str) -> str:
    """Return the class that torch had for a backend's name before 2.15, where "nccl" became another one.

    >>> first_backend_class("gloo")
    'ProcessGroupGloo'
    """
    return f"ProcessGroup{'Gloo' if backend == DEVICES['cpu'].backend else backend.upper()}"


def device_of(backend: str) -> str:
    """Return the type of device whose tensors a backend moves; the first of several."""
    return next((name for name, device in DEVICES.items() if device.backend == backend), "cpu")
