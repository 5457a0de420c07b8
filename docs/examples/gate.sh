# Compares the working tree with the revision $BASE: what bench.py communicates, then how long it takes.
# Variables: TORCH_INDEX is pip's index of torch's CPU wheels; DISTBENCH is what pip installs.
set -euo pipefail
python3 -m venv .venv-gate
. .venv-gate/bin/activate
pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==2.13.0"
pip install --quiet "${DISTBENCH:-git+https://<this repository>}"
distbench signature write bench.py --output-dir new
distbench signature check signatures new --write junit=signature.xml --write markdown=signature.md
distbench ab "$BASE" . --results runs --write junit=gate.xml --write markdown=gate.md -- \
  bench.py --quick --passes 24 --budget 12
