#!/usr/bin/env bash
# One script for everything. `./run.sh help` lists what it does; CI calls `check` and `test`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

venv=.venv
python=$venv/bin/python
# Images for containers often set it: every process that is started here would compile all that it imports anew.
unset PYTHONDONTWRITEBYTECODE

usage() {
    cat <<'TEXT'
./run.sh             set up, run the shipped scenarios in their quick sizes, print the summary, write results/report.html
./run.sh test        set up and run the tests, three at a time (further words go to pytest; --fast: none that starts a process)
./run.sh gpu-tests   set up and run the tests that need one accelerator or several; what passed is in build/gpu-tests.md
./run.sh torches     set up and try other torch versions: doctor --deep, the fast tests, some of ranks (VERSION... or newest or all; by default the oldest and the newest)
./run.sh check       set up and check format, lint and types
./run.sh signatures  set up and hold what the shipped scenarios communicate against signatures/ (--update rewrites that)
./run.sh bench       set up, run the project's own benchmarks and print the table of promises (NAME...; --quick: no long ones)
./run.sh docs        set up and build the documentation site into build/site
./run.sh screens     set up, run what docs/screens.md shows, and draw it anew (NAME...)
./run.sh ANYTHING    set up and run `distbench ANYTHING`
TEXT
}

fail() {
    echo "run.sh: $1" >&2
    exit "${2:-2}"
}

# Called as a command of its own, never before `&&` or `||`: bash would go on after a step that failed. Each step is
# repeated by the next call until it has worked: what is there already is kept.
set_up() {
    local again="run the same command again, it goes on from there"
    if [ -x "$python" ] && [ "$venv/.installed" -nt pyproject.toml ] && [ "$venv/.installed" -nt constraints.txt ]; then
        return
    fi
    if [ ! -x "$python" ]; then
        command -v python3 >/dev/null || fail "there is no python3 here; install Python 3.11 or newer"
        python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
            fail "python3 is older than 3.11; install Python 3.11 or newer"
        echo "run.sh: making $venv" >&2
        python3 -m venv "$venv" ||
            fail "python3 could not make the virtual environment $venv: see above (Debian and Ubuntu have what it needs in python3-venv); then $again"
    fi
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        "$python" -m ensurepip --upgrade >/dev/null ||
            fail "$venv has no pip, and Python here cannot bring one: see above (Debian and Ubuntu have it in python3-venv); delete $venv, then $again"
    fi
    echo "run.sh: installing (a few minutes the first time)" >&2
    pip_install "torch==2.13.0"
    pip_install --editable '.[test,check,docs,hf,torchx]'
    touch "$venv/.installed" || fail "$venv cannot be written: see above; make room, then $again"
}

pip_install() {
    "$python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$@" ||
        fail "pip could not install ${*: -1}: see above for why (a network, an index that cannot be reached, a full disk); then $again"
}

# Every scenario but the one that `distbench calibrate` runs (it feeds a profile, and has no table of its own) and the
# laboratory (it records what torch gets wrong, and so never ends with 0; what it tries depends on the profile here),
# models at their real size, which no CPU runs, and links, which are a matter of a cluster.
# Further words are tags to leave out, too.
shipped() {
    "$python" -m distbench list --format json | "$python" -c \
        'import json, sys; [print(row["name"]) for row in json.load(sys.stdin) if not {"calibrate", "laboratory", "links", "real-size", *sys.argv[1:]} & set(row["tags"])]' "$@"
}

quick_start() {
    local code=0 list page=results/report.html
    # Those tagged so are for a second look: the first one shall take little more than two minutes.
    list=$(shipped further)
    mapfile -t names <<<"$list"
    rm -f "$page"
    # Of FSDP2's knobs as many as eight passes of fit the budget of a quick run; `distbench run fsdp_knobs` has them all.
    local knobs=plain,keep,reshard_to_2,hybrid,bf16_params,columns,prefetch_2,accumulate,accumulate_synced,gather_bf16
    # Ulysses and compiling are for a second look, too: compiling takes ten times as long as what it is timed for.
    "$python" -m distbench run "${names[@]}" --quick --set "knob=$knobs" --set compile_backend=none \
        -k "not rotate=ulysses" || code=$?
    "$python" -m distbench report --page "$page" >/dev/null || code=$((code ? code : $?))
    [ ! -e "$page" ] || echo "page: $page"
    return "$code"
}

signatures() {
    local list
    list=$(shipped)
    mapfile -t names <<<"$list"
    rm -rf build/signatures
    "$python" -m distbench signature "${names[@]}" --quick -o build/signatures
    "$python" -m distbench gate --signature signatures build/signatures "$@"
}

tests() {
    # Tests of real launches wait for a part of their time: three processes have work for two CPUs. Fast ones never wait.
    local processes=3
    [[ " $* " != *" --fast "* ]] || processes=2
    # numpy's own threads would wait for one another, spinning: pytest's processes have the CPUs already.
    OPENBLAS_NUM_THREADS=1 exec "$python" -m pytest --numprocesses "$processes" --dist loadfile --no-loadscope-reorder "$@"
}

if [ "${1-}" = help ]; then
    usage
    exit
fi
set_up
case "${1-}" in
    "") quick_start ;;
    test) tests "${@:2}" ;;
    gpu-tests) exec "$python" tests/gpu_tests.py "${@:2}" ;;
    torches) exec "$python" tests/torches.py "${@:2}" ;;
    check) "$venv/bin/ruff" format --check . && "$venv/bin/ruff" check . && exec "$venv/bin/mypy" ;;
    signatures) signatures "${@:2}" ;;
    docs) NO_MKDOCS_2_WARNING=1 exec "$python" -m mkdocs build --quiet ;;
    bench) exec "$python" -m benchmarks "${@:2}" ;;
    screens) exec "$python" -m benchmarks.screens "${@:2}" ;;
    *) exec "$python" -m distbench "$@" ;;
esac
