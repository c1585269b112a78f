#!/usr/bin/env bash
# Pretrain a language model with torchrun on one machine. The grid comes from the environment, everything else from flags:
#     NPROC=8 TP=2 PP=2 CP=2 bash examples/pretrain_llm.sh --config examples/small.yaml --data-path DIR --train-iters 1000
# Data parallelism takes the remaining ranks: dp = NPROC / (TP x PP x CP).
# LAYOUT=auto lets megacp-plan choose the flags of the layout that are not given (examples/layout.sh).
set -euo pipefail
NPROC=${NPROC:-1}
# How long torchrun waits for ranks that save after SIGTERM before it kills them (its default is 30 s).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# A new rendezvous store after each restart, so that a machine that replaces a lost one can join.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
run=(${TP:+--tensor-model-parallel-size "$TP"} ${PP:+--pipeline-model-parallel-size "$PP"}
    ${CP:+--context-parallel-size "$CP"} "$@")
. "$(dirname "$0")/layout.sh"
add_layout "$NPROC"
[[ " $* " == *" --dry-run "* ]] && exec python -m megacp.train "${run[@]}"
# Check everything in one process first: torchrun would bury a refusal under a long report.
python -m megacp.train "${run[@]}" --dry-run --world-size "$NPROC" > /dev/null
exec torchrun --standalone --nproc-per-node "$NPROC" -m megacp.train "${run[@]}"
