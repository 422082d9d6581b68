#!/bin/bash
# Run the comparison with verl on one GPU, in calls of at most 10 minutes, one after the other on the same machine.
#
#   bash benchmarks/peers/device.sh SITE OUT check           # imports, versions, whether verl takes the settings: no GPU work
#   bash benchmarks/peers/device.sh SITE OUT short           # 256 tokens, both sides; so are the next
#   bash benchmarks/peers/device.sh SITE OUT ragged          # at most 4,080 tokens
#   bash benchmarks/peers/device.sh SITE OUT long            # 4,080 tokens
#   bash benchmarks/peers/device.sh SITE OUT lora            # adapters of the 8B shape, merged
#   bash benchmarks/peers/device.sh SITE OUT lora-adapters   # adapters of the 8B shape, sent apart
#   bash benchmarks/peers/device.sh SITE OUT table           # one table of all that was kept
#
# SITE is the directory with the wheels of CoreRL and of verl.txt, or "-" where they are in the environment; OUT gets the JSON
# files and the logs. What a call has completed is kept in PEERS_KEEP (/tmp/peers), and a call that is repeated makes the rest.
# Further words are of benchmarks.peers.verl: `long --steps 2`.
set -euo pipefail
site=$1 out=$2 part=$3
keep=${PEERS_KEEP:-/tmp/peers}
cd "$(dirname "$0")/../.."
[ "$site" = - ] || export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PATH="$site/bin:$PATH"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$out" "$keep"

compare() {  # CASE WORDS...
    case=$1
    trap 'cp "$keep/$case"-*.log "$out/"' EXIT
    python3 -m benchmarks.peers.verl --keep "$keep" --warm 1 --deadline 420 --case "$@" --output "$out/$1.json"
}

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
    python3 -m verl.trainer.main_ppo --cfg job "${overrides[@]}" > "$out/verl.yaml"
    ;;
short) compare short --steps 4 "${@:4}" ;;
ragged) compare ragged --steps 2 "${@:4}" ;;
long) compare long --steps 1 "${@:4}" ;;
# verl's Triton kernel for log-probs ended with an illegal memory access with this shape: see results/h200-peers.md.
lora) compare lora-8b --steps 3 --fused torch "${@:4}" ;;
lora-adapters) compare lora-8b-adapters --steps 3 --fused torch "${@:4}" ;;
table) python3 -m benchmarks.peers.verl --keep "$keep" --side none --warm 1 | tee "$out/table.md" ;;
*) echo "no part $part" >&2; exit 2 ;;
esac
