"""`distbench run --nodes N`: the same command on many nodes, through torchrun, Slurm or TorchX."""

from distbench.nodes.node_launch import LAUNCHERS, NodeLaunch, launcher_here
from distbench.nodes.slurm_job import has_gpus, run_by_slurm, slurm_script, slurm_text
from distbench.nodes.torchrun_nodes import run_by_torchrun, torchrun_lines
from distbench.nodes.torchx_job import run_by_torchx, torchx_line

__all__ = [
    "LAUNCHERS",
    "NodeLaunch",
    "has_gpus",
    "launcher_here",
    "run_by_slurm",
    "run_by_torchrun",
    "run_by_torchx",
    "slurm_script",
    "slurm_text",
    "torchrun_lines",
    "torchx_line",
]
