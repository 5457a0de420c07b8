#!/usr/bin/env bash
# One script for everything. `./run.sh help` lists its commands; CI runs `check`, `signatures` and `test`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

venv=.venv
python=$venv/bin/python
stamp=$venv/.installed # the installed extras of pyproject.toml, one per line
# Container images often set this variable. It would make every process compile the modules it imports again.
unset PYTHONDONTWRITEBYTECODE

usage() {
    cat <<'TEXT'
./run.sh             run shipped scenarios in quick sizes, print a summary and write results/report.html
./run.sh test        run the tests in three processes (--all: also long ones; --fast: only tests that start no process;
                     more words go to pytest)
./run.sh gpu-tests   run the tests that need one or more accelerators; the passed tests are listed in build/gpu-tests.md
./run.sh gpu-day     run GPU tests, measured and simulated steps, memory and a profiled step on one GPU in at most
                     25 minutes; the report is build/gpu-day.md (--rehearse: with quick sizes on the CPU)
./run.sh torches     test other torch versions: doctor --deep, the fast tests, some tests with ranks
                     (VERSION..., newest or all; default: the oldest and the newest)
./run.sh check       check format, lint, types and prose
./run.sh signatures  compare the communication of the shipped scenarios with signatures/ (--update rewrites signatures/)
./run.sh bench       run the project's own benchmarks and print the table of guarantees (NAME...; --quick: no long ones)
./run.sh docs        build the documentation site into build/site
./run.sh screens     run the commands of docs/screens.md and draw their screens (NAME...)
./run.sh ANYTHING    run `distbench ANYTHING`

Each command first installs what it needs into .venv, once. Running needs torch and a few packages; test, check, docs and
bench add their own packages.
TEXT
}

fail() {
    echo "run.sh: $1" >&2
    exit "${2:-2}"
}

# Prints the extras of pyproject.toml that a command needs in addition to the package itself.
extras_of() {
    case "$1" in
        test | gpu-tests | gpu-day | torches) echo test docs hf torchx spmd ;;
        check) echo check ;;
        docs) echo docs ;;
        bench | screens) echo test hf spmd ;;
    esac
}

# Call set_up as a command of its own, never before `&&` or `||`: bash would continue after a failed step. The next call
# repeats an unfinished step and keeps finished ones.
set_up() {
    local again="run the same command again; finished steps are kept" extra wanted="" missing="" begun=$SECONDS
    if [ -e "$stamp" ]; then wanted=$(tr '\n' ' ' <"$stamp"); fi
    for extra in $(extras_of "${1-}"); do
        [[ " $wanted " == *" $extra "* ]] || missing+=" $extra"
    done
    # Changed requirements: everything that is installed is brought up to date.
    if [ ! -x "$python" ] || [ ! "$stamp" -nt pyproject.toml ] || [ ! "$stamp" -nt constraints.txt ]; then
        missing="$wanted$missing"
    elif [ -z "$missing" ]; then
        return
    fi
    local steps=1 step=0
    [ -x "$python" ] || steps=2
    if [ ! -x "$python" ]; then
        command -v python3 >/dev/null || fail "there is no python3 here; install Python 3.11 or newer"
        python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
            fail "python3 is older than 3.11; install Python 3.11 or newer"
        announce "virtual environment $venv"
        python3 -m venv "$venv" ||
            fail "python3 could not make the virtual environment $venv (see above; on Debian and Ubuntu, install python3-venv); then $again"
    fi
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        "$python" -m ensurepip --upgrade >/dev/null ||
            fail "$venv has no pip, and this Python cannot install it (see above; on Debian and Ubuntu, install python3-venv); delete $venv, then $again"
    fi
    missing=$(echo $missing)
    announce "torch, distbench and their packages${missing:+, with those of ${missing// /, }} (minutes on a slow network)"
    pip_install --editable ".${missing:+[${missing// /,}]}"
    { printf '%s\n' $wanted $missing | sort -u | sed '/^$/d' >"$stamp"; } 2>/dev/null ||
        fail "$stamp cannot be written; free some space, then $again"
    echo "run.sh: set-up finished after $((SECONDS - begun)) s" >&2
}

announce() {
    step=$((step + 1))
    echo "run.sh: set-up, step $step of $steps, $((SECONDS - begun)) s: $1" >&2
}

# Installs without compiling: Python compiles the modules that are imported, which are a fifth of what is installed.
pip_install() {
    "$python" -m pip install --no-compile --disable-pip-version-check --constraint constraints.txt "$@" | show_packages ||
        fail "pip could not install ${*: -1} (see above for the reason: network, unreachable index, full disk); then $again"
}

# Reduces pip's output to one line, which a terminal rewrites: how many packages were found, which one is loaded.
show_packages() {
    local verb rest count=0 line
    while read -r verb rest; do
        case "$verb" in
            Collecting) line="$((count += 1)) packages found: $rest" ;;
            Downloading) line="$count packages found, downloading ${rest##*/}" ;;
            Installing) line="writing $(wc -w <<<"${rest#*: }") packages" ;;
            *) continue ;;
        esac
        if [ -t 2 ]; then printf '\r\033[K  %.76s' "$line" >&2; fi
    done
    if [ -t 2 ]; then printf '\r\033[K' >&2; fi
}

# Prints the names of the shipped scenarios without those of `distbench calibrate` (no table of their own), the planner
# study (it records errors of torch, so its exit code is never 0), models of real size (too large for a CPU), links (for
# clusters) and scenarios that need packages which distbench does not install. Further words are more tags to leave out.
shipped() {
    "$python" -m distbench list --format json | "$python" -c \
        'import json, sys; [print(row["name"]) for row in json.load(sys.stdin) if not {"calibrate", "laboratory", "links", "optional", "real-size", *sys.argv[1:]} & set(row["tags"])]' "$@"
}

quick_start() {
    local code=0 list page=results/report.html
    # The first look must take about two minutes. Scenarios with the tag "further", the other options and the other
    # redistributions are for a second look.
    list=$(shipped further)
    mapfile -t names < <(grep -vx llama_2d <<<"$list")
    rm -f "$page"
    "$python" -m distbench run llama_2d "${names[@]}" --quick --set knob=plain,hybrid,bf16_params,accumulate \
        --set unshard_output=False \
        -k "not rotate=ulysses and not f32[64,64] and (not '->' or 'S(0)S(1)->' or 'S(1)S(0)->')" || code=$?
    "$python" -m distbench report --page "$page" >/dev/null || code=$((code ? code : $?))
    [ ! -e "$page" ] || echo "page: $page"
    return "$code"
}

signatures() {
    local list
    list=$(shipped)
    mapfile -t names <<<"$list"
    rm -rf build/signatures
    local verb=check
    if [ "${1-}" = --update ]; then
        verb=update
        shift
    fi
    "$python" -m distbench signature write "${names[@]}" --quick --output-dir build/signatures
    "$python" -m distbench signature "$verb" signatures build/signatures "$@"
}

tests() {
    # Tests of real launches wait for part of their time, so three processes keep two CPUs busy. Fast tests never wait.
    local processes=3
    [[ " $* " != *" --fast "* ]] || processes=2
    # pytest's processes already use the CPUs; threads of numpy would only spin while they wait for each other.
    OPENBLAS_NUM_THREADS=1 exec "$python" -m pytest --numprocesses "$processes" --dist loadfile --no-loadscope-reorder "$@"
}

if [ "${1-}" = help ]; then
    usage
    exit
fi
set_up "${1-}"
case "${1-}" in
    "") quick_start ;;
    test) tests "${@:2}" ;;
    gpu-tests) exec "$python" tests/gpu_tests.py "${@:2}" ;;
    gpu-day) exec "$python" tests/gpu_day.py "${@:2}" ;;
    torches) exec "$python" tests/torches.py "${@:2}" ;;
    check)
        "$venv/bin/ruff" format --check .
        "$venv/bin/ruff" check .
        "$python" -m benchmarks.prose
        exec "$venv/bin/mypy"
        ;;
    signatures) signatures "${@:2}" ;;
    docs) NO_MKDOCS_2_WARNING=1 exec "$python" -m mkdocs build --quiet ;;
    bench) exec "$python" -m benchmarks "${@:2}" ;;
    screens) exec "$python" -m benchmarks.screens "${@:2}" ;;
    *) exec "$python" -m distbench "$@" ;;
esac
