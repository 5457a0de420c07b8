"""`./run.sh bench [NAME...]`: run the benchmarks (all, or those named); print each measurement beside its promise."""

import importlib
import pkgutil
import sys
from pathlib import Path


def names() -> list[str]:
    """Every benchmark, by the module's name without `bench_`."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    return [module.name.removeprefix("bench_") for module in modules if module.name.startswith("bench_")]


def main(chosen: list[str]) -> int:
    """Run and print; 0 when every promise holds."""
    unknown = [name for name in chosen if name not in names()]
    if unknown:
        print(f"no benchmark {unknown[0]!r}; there are {', '.join(names())}", file=sys.stderr)
        return 2
    kept = True
    for name in chosen or names():
        print(f"{name}:", flush=True)
        for row, measured, allowed in importlib.import_module(f"benchmarks.bench_{name}").main():
            # A promise is a ceiling, or with a minus sign before it a floor.
            holds = measured <= allowed if allowed >= 0 else measured >= -allowed
            kept &= holds
            bound = f"at most {allowed:g}" if allowed >= 0 else f"at least {-allowed:g}"
            print(f"  {'ok  ' if holds else 'FAIL'} {row:<64} {measured:9.3f}  ({bound})", flush=True)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
