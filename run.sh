#!/usr/bin/env bash
# One script for everything. `./run.sh help` lists what it does; CI calls `check` and `test`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

venv=.venv
python=$venv/bin/python

usage() {
    cat <<'TEXT'
./run.sh             set up, run every shipped scenario in its quick size, print the report
./run.sh test        set up and run the tests, two at a time (further words go to pytest; --fast: none that starts a process)
./run.sh check       set up and check format, lint and types
./run.sh signatures  set up and hold what the shipped scenarios communicate against signatures/ (--update rewrites that)
./run.sh bench       set up, run the project's own benchmarks and print the README's table (NAME...; --quick: no long ones)
./run.sh ANYTHING    set up and run `distbench ANYTHING`
TEXT
}

# Installing is skipped when the stamp is as new as what it was made from.
set_up() {
    if [ ! -x "$python" ]; then
        python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            echo "run.sh: python3 is older than 3.11; install Python 3.11 or newer" >&2
            exit 2
        }
        echo "run.sh: making $venv" >&2
        python3 -m venv "$venv"
    fi
    if [ "$venv/.installed" -nt pyproject.toml ] && [ "$venv/.installed" -nt constraints.txt ]; then
        return
    fi
    echo "run.sh: installing (a few minutes the first time)" >&2
    "$python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "torch==2.13.0"
    "$python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,check]'
    touch "$venv/.installed"
}

# Every scenario but the one that `distbench calibrate` runs (it feeds a profile, and has no table of its own) and the
# laboratory (it records what torch gets wrong, and so never ends with 0; what it tries depends on the profile here).
shipped() {
    "$python" -m distbench list --json | "$python" -c \
        'import json, sys; [print(row["name"]) for row in json.load(sys.stdin) if not {"calibrate", "laboratory"} & set(row["tags"])]'
}

quick_start() {
    local code=0
    mapfile -t names < <(shipped)
    "$python" -m distbench run "${names[@]}" --quick || code=$?
    "$python" -m distbench report --plots results/plots
    return "$code"
}

signatures() {
    mapfile -t names < <(shipped)
    rm -rf build/signatures
    "$python" -m distbench signature "${names[@]}" --quick -o build/signatures
    "$python" -m distbench gate --signature signatures build/signatures "$@"
}

case "${1-}" in
    "") set_up && quick_start ;;
    help) usage ;;
    test) set_up && shift && exec "$python" -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@" ;;
    check) set_up && "$venv/bin/ruff" format --check . && "$venv/bin/ruff" check . && exec "$venv/bin/mypy" ;;
    signatures) set_up && shift && signatures "$@" ;;
    bench) set_up && shift && exec "$python" -m benchmarks "$@" ;;
    *) set_up && exec "$python" -m distbench "$@" ;;
esac
