"""The types of device on which ranks compute. This module does not import torch; ranks/device.py has the calls to
torch.

Like torch, distbench uses the name "cuda" for ROCm's devices too. torch's build determines the platform.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Lister:
    """A command that lists this host's devices on lines that begin with `line`. Below each device, indented lines that
    begin with `part` list the device's parts."""

    command: tuple[str, ...]
    line: str
    part: str = ""


@dataclass(frozen=True)
class DeviceType:
    """The properties of a type of device.

    Args:
        backend: the process group's backend for the device's tensors, unless torch has a default.
        per_host: the usual number of devices per host, for prices of groups that were not measured.
        scales_sums: whether the backend can scale values in a reduction (NCCL's ncclRedOpCreatePreMulSum).
        waits_on_host: whether the host waits for a collective's end; otherwise a stream waits.
        variables: environment variables that change measurements, for the run file's header.
        families: prefixes of further variables, because libraries add variables with each version.
        visible: environment variables that list the devices of a process.
        listers: commands that list the devices; the first installed command is used.
        files: patterns of files, one file per device, if no lister is installed; a file that contains "0" does not
            count.
        brought_by: packages, or suffixes of torch's version; torch needs one of these for this device. Without
            `listers` and `files`, torch counts the devices.
        drivers: the platforms for which torch can be built; "" for the device's name alone.
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


# Keys are torch's names, which are also the values of --device.
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
        # AMD's driver also lists CPUs, with the id 0.
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
# Settings that slow down collectives or make every launch wait.
SWITCHED_OFF = {
    **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "CUDA_LAUNCH_BLOCKING"), "1"),
    **dict.fromkeys(("NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE"), "0"),
    "NCCL_P2P_LEVEL": "LOC",
}
# The CPU binding of ranks near their device, by torchrun's names: node, socket, exclusive, core-complex.
NUMA_BINDING = "DISTBENCH_NUMA_BINDING"
ACCELERATORS = tuple(name for name in DEVICES if name != "cpu")
ANY_ACCELERATOR = f"{', '.join(ACCELERATORS[:-1])} or {ACCELERATORS[-1]}"  # for messages
# Fields of a run file's header with the versions of the accelerators' drivers.
DRIVER_FIELDS = ("nccl", "cuda", "hip", "driver")
DEVICE_HELP = "Default: this host's accelerator, else cpu."


# Backends that ways of a collective may name, of accelerators only: torch's two of NCCL, and a package with its own.
WAY_BACKENDS = ("nccl-legacy", "nccl2", "torchcomms")


def known_device(name: str) -> DeviceType:
    """Return the entry of a type of device; an unlisted type is an accelerator without properties."""
    return DEVICES.get(name) or DeviceType("")


def built_for(name: str) -> str:
    """Return the platforms for which torch must be built to support such a device, in words."""
    return known_device(name).drivers or name.upper()


def is_accelerator(name: str) -> bool:
    """Return whether a type of device is not the CPU."""
    return name != "cpu"


def backend_for(device: str, backend: str = "") -> str:
    """Return the backend text of torch's default process group, with gloo for tensors on the CPU."""
    backend = backend or known_device(device).backend
    return f"cpu:gloo,{device}:{backend}" if is_accelerator(device) else backend


def first_backend_class(backend: str) -> str:
    """Return the name of torch's class for a backend before 2.15; since 2.15, "nccl" has another class.

    >>> first_backend_class("gloo")
    'ProcessGroupGloo'
    """
    return f"ProcessGroup{'Gloo' if backend == DEVICES['cpu'].backend else backend.upper()}"


def device_of(backend: str) -> str:
    """Return the type of device for whose tensors a backend communicates; the first of several types."""
    return next((name for name, device in DEVICES.items() if device.backend == backend), "cpu")
