#!/usr/bin/env bash
# Pretrain on several machines: the same line on each of them, which torchrun joins to one run.
#     NNODES=8 HEAD=10.0.0.1 NPROC=8 TP=2 CP=2 bash examples/pretrain_nodes.sh --config examples/small.yaml --data-path DIR --save DIR
# HEAD is any machine of the run, the same for all; it must survive. Data parallelism takes the remaining ranks.
# LAYOUT=auto lets megacp-plan choose the flags of the layout that are not given (examples/layout.sh).
# It plans for NNODES machines: start the script again on each of them if their number changes.
set -euo pipefail
NNODES=${NNODES:?machines of the run}
HEAD=${HEAD:?address of one machine of the run, the same for all}
NPROC=${NPROC:-8}
# How long torchrun waits for ranks that save after SIGTERM before it kills them (its default is 30 s).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-540}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
# A new rendezvous store after each restart, so that a machine that replaces a lost one can join.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
run=(${TP:+--tensor-model-parallel-size "$TP"} ${PP:+--pipeline-model-parallel-size "$PP"}
    ${CP:+--context-parallel-size "$CP"} "$@")
. "$(dirname "$0")/layout.sh"
if [[ -n ${LAYOUT:-} ]]; then
    if [[ $NNODES == *:* ]]; then
        echo "error: LAYOUT=$LAYOUT plans for one number of machines, NNODES is $NNODES" >&2
        exit 2
    fi
    add_layout "$((NNODES * NPROC))" own
fi
[[ " $* " == *" --dry-run "* ]] && exec python -m megacp.train "${run[@]}" --world-size "$((NNODES * NPROC))"
exec torchrun --nnodes "$NNODES" --nproc-per-node "$NPROC" --max-restarts "${MAX_RESTARTS:-3}" \
    --rdzv-id "${RUN_ID:-megacp}" --rdzv-backend c10d --rdzv-endpoint "$HEAD:${MASTER_PORT:-29500}" \
    -m megacp.train "${run[@]}"
