#!/usr/bin/env bash
# Pretrain a language model with torchrun on one machine. Environment variables set the grid; flags set everything else:
#     NPROC=8 TP=2 PP=2 CP=2 bash examples/pretrain_llm.sh --config examples/small.yaml --data-path DIR --train-iters 1000
# Data parallelism uses the remaining ranks: dp = NPROC / (TP x PP x CP).
# With LAYOUT=auto, megacp-plan chooses the parallel layout flags that you do not set (examples/layout.sh).
set -euo pipefail
NPROC=${NPROC:-1}
# Seconds that torchrun gives ranks to save after SIGTERM before it kills them (30 by default).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Use a new rendezvous store after each restart. Otherwise a machine that replaces a lost one cannot join.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
run=(${TP:+--tensor-model-parallel-size "$TP"} ${PP:+--pipeline-model-parallel-size "$PP"}
    ${CP:+--context-parallel-size "$CP"} "$@")
. "$(dirname "$0")/layout.sh"
add_layout "$NPROC"
[[ " $* " == *" --dry-run "* ]] && exec python -m megacp.train "${run[@]}"
# Check the configuration in one process first, because torchrun buries an error in a long report.
python -m megacp.train "${run[@]}" --dry-run --world-size "$NPROC" > /dev/null
exec torchrun --standalone --nproc-per-node "$NPROC" -m megacp.train "${run[@]}"
