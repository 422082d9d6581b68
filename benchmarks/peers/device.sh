#!/bin/bash
# Run the comparison with verl on one GPU of a machine that ends a command after some minutes, and is lost when it is idle.
#
#   bash benchmarks/peers/device.sh SITE check              # imports, versions, whether verl takes the settings: no GPU work
#   bash benchmarks/peers/device.sh SITE start WORDS...     # all cases, in a session of their own that outlives the command
#   bash benchmarks/peers/device.sh SITE watch SECONDS OUT  # what they print, for so long at most; all that is kept goes to OUT
#
# SITE is the directory with the wheels of CoreRL and of verl.txt, or "-" where they are in the environment. WORDS are of
# benchmarks.peers.verl: `--attention fa3`. What the cases have completed is in PEERS_KEEP (/tmp/peers).
set -euo pipefail
site=$1 part=$2
shift 2
keep=${PEERS_KEEP:-/tmp/peers}
cd "$(dirname "$0")/../.."
[ "$site" = - ] || export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PATH="$site/bin:$PATH"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$keep"

case $part in
check)
    python3 - <<'PY'
from importlib import import_module

for name in (
    "transfer_queue", "verl.trainer.main_ppo", "verl.trainer.ppo.v1", "verl.workers.engine_workers",
    "verl.experimental.agent_loop.single_turn_agent_loop", "verl.experimental.reward_loop",
    "verl.workers.rollout.sglang_rollout.async_sglang_server", "verl.workers.rollout.sglang_rollout.sglang_rollout",
    "verl.utils.kernel.linear_cross_entropy", "benchmarks.peers.attention",
):
    import_module(name)
    print("imports", name, flush=True)
PY
    python3 -m benchmarks.peers.verl --case short --overrides --keep "$keep" > "$keep/overrides"
    mapfile -t overrides < "$keep/overrides"
    python3 -m verl.trainer.main_ppo --cfg job "${overrides[@]}" > "$keep/verl.yaml"
    ;;
start)
    setsid nohup python3 -m benchmarks.peers.verl --case short lora-8b ragged lora-8b-adapters long \
        --keep "$keep" --output "$keep/verl.json" "$@" > "$keep/log" 2>&1 < /dev/null &
    echo $! > "$keep/pid"
    ;;
watch)
    timeout "$1" tail -n +1 --pid "$(cat "$keep/pid")" -f "$keep/log" || true
    tar czf "$2/peers.tgz" -C "$keep" $(cd "$keep" && ls | grep -E '(json|log)$')
    ;;
*) echo "no part $part" >&2; exit 2 ;;
esac
