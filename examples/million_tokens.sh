#!/usr/bin/env bash
# Train an 8B text model on packs of 1,048,576 tokens on one machine of 8 GPUs with 80 GB each:
#     bash examples/million_tokens.sh --data-path DIR --save DIR
# A row is dealt over all GPUs, heads are exchanged for tokens around attention, all state is sharded, inputs of blocks
# and results of attention wait in host memory (73 GiB a rank), the MLP runs over tiles of 8,192 tokens.
#
# Memory of one rank, of a step on fake tensors (not measured on a GPU; communicators and fragments come on top):
#     python tools/check_gpu.py --fake --mask mixed $(bash examples/million_tokens.sh --flags)
#    8 GPUs, any mask       32.0 GiB
# With COMM=kv_exchange CP_LAYOUT=balanced 44.0 GiB for mask mixed, 59.3 GiB for one causal document.
# LAYOUT=auto lets megacp-plan choose the flags of the layout that are not given (examples/layout.sh).
set -euo pipefail
cd "$(dirname "$0")/.."
NPROC=${NPROC:-8}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
run=(--config examples/recipes/qwen3_8b/model.yaml --dtype bfloat16
    --seq-length 1048576 --micro-batch-size 1 --global-batch-size 1 --lr 1.0e-5)
if [[ ${LAYOUT:-} != auto ]]; then
    run+=(--context-parallel-size "$NPROC" --cp-comm-type "${COMM:-a2a}" --cp-layout "${CP_LAYOUT:-contiguous}"
        --data-parallel-sharding-strategy optim_grads_params --recompute-granularity full
        --activation-offload 0.99 --mlp-chunk-tokens 8192)
fi
launch=(exec python -m megacp.train --nproc "$NPROC")
if [[ ${1:-} == --flags ]]; then
    launch=(exec echo --world-size "$NPROC")
    shift
fi
run+=("$@")
. examples/layout.sh
add_layout "$NPROC"
"${launch[@]}" "${run[@]}"
