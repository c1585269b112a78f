#!/usr/bin/env bash
# Pretrain on several machines. Run the same command on each machine, and torchrun joins them into one run:
#     NNODES=8 HEAD=10.0.0.1 NPROC=8 TP=2 CP=2 bash examples/pretrain_nodes.sh --config examples/small.yaml --data-path DIR --save DIR
# HEAD is the address of one machine of the run, the same on all machines. This machine must not fail. Data parallelism
# uses the remaining ranks.
# With LAYOUT=auto, megacp-plan chooses the parallel layout flags that you do not set (examples/layout.sh).
# It plans for NNODES machines. If their number changes, start the script again on each of them.
set -euo pipefail
NNODES=${NNODES:?set NNODES to the number of machines of the run}
HEAD=${HEAD:?set HEAD to the address of one machine of the run, the same on all machines}
NPROC=${NPROC:-8}
# Seconds that torchrun gives ranks to save after SIGTERM before it kills them (30 by default).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-540}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
# Use a new rendezvous store after each restart. Otherwise a machine that replaces a lost one cannot join.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
run=(${TP:+--tensor-model-parallel-size "$TP"} ${PP:+--pipeline-model-parallel-size "$PP"}
    ${CP:+--context-parallel-size "$CP"} "$@")
. "$(dirname "$0")/layout.sh"
if [[ -n ${LAYOUT:-} ]]; then
    if [[ $NNODES == *:* ]]; then
        echo "error: LAYOUT=$LAYOUT plans for a fixed number of machines, but NNODES is $NNODES" >&2
        exit 2
    fi
    add_layout "$((NNODES * NPROC))" own
fi
[[ " $* " == *" --dry-run "* ]] && exec python -m megacp.train "${run[@]}" --world-size "$((NNODES * NPROC))"
exec torchrun --nnodes "$NNODES" --nproc-per-node "$NPROC" --max-restarts "${MAX_RESTARTS:-3}" \
    --rdzv-id "${RUN_ID:-megacp}" --rdzv-backend c10d --rdzv-endpoint "$HEAD:${MASTER_PORT:-29500}" \
    -m megacp.train "${run[@]}"
