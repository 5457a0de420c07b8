"""Only what pyproject.toml cannot say: packages are found, and the top-level `scenarios/` ships inside `distbench`."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["distbench", "distbench.*"]), "distbench.scenarios"],
    package_dir={"distbench.scenarios": "scenarios"},
)
