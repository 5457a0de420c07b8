"""The types of device that ranks compute on, without torch; what torch does with each is in worker/rank/device.py."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceType:
    """One type of device.

    Args:
        backend: moves its tensors.
        waits_on_host: whether a collective ends where the host waits for it; elsewhere it ends on a stream.
        variables: environment variables that change what is measured, for the run file's header.
        visible: environment variable that lists the devices a process may use.
        lister: command that lists this host's devices, each on a line that begins with `line`.
        line: see lister.
        node: what the devices' files in /dev are called, their numbers apart, where there is no lister.
    """

    backend: str
    waits_on_host: bool = False
    variables: tuple[str, ...] = ()
    visible: str = ""
    lister: tuple[str, ...] = ()
    line: str = ""
    node: str = ""


# By torch's name, which is also what --device takes.
DEVICES = {
    "cpu": DeviceType("gloo", waits_on_host=True, variables=("GLOO_SOCKET_IFNAME",)),
    "cuda": DeviceType(
        "nccl",
        variables=(
            *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_ALGO", "NCCL_PROTO", "NCCL_SOCKET_IFNAME"),
            *("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
            *("NCCL_NTHREADS", "NCCL_BUFFSIZE", "TORCH_NCCL_AVOID_RECORD_STREAMS", "PYTORCH_CUDA_ALLOC_CONF"),
        ),
        visible="CUDA_VISIBLE_DEVICES",
        lister=("nvidia-smi", "--list-gpus"),
        line="GPU ",
        node="nvidia",
    ),
}
ACCELERATORS = tuple(name for name in DEVICES if name != "cpu")
# Fields of a run file's header that hold the versions of what drives accelerators.
DRIVER_FIELDS = ("nccl", "cuda")
DEVICE_HELP = f"Default: {' or '.join(ACCELERATORS)} where there is a GPU, else cpu."


def backend_for(device: str) -> str:
    """The default group's backend as torch takes it: tensors on the CPU move too."""
    return DEVICES[device].backend if device == "cpu" else f"cpu:gloo,{device}:{DEVICES[device].backend}"


def device_of(backend: str) -> str:
    """The type of device whose tensors a backend moves."""
    return next((name for name, one in DEVICES.items() if one.backend == backend), "cpu")
