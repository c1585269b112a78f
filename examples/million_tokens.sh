#!/usr/bin/env bash
# Train an 8B text model on packs of 1,048,576 tokens on one machine with 8 GPUs of 80 GB:
#     bash examples/million_tokens.sh --data-path DIR --save DIR
# All GPUs share a row. Attention exchanges tokens for heads (all-to-all), and all state is sharded. Block inputs and
# attention outputs are offloaded to host memory (73 GiB per rank). The MLP processes chunks of 8,192 tokens.
#
# Memory of one rank, from a step on fake tensors (not measured on a GPU; communicators and fragmentation are extra):
#     python tools/check_gpu.py --fake --mask mixed $(bash examples/million_tokens.sh --flags)
#    8 GPUs, any mask       32.0 GiB
# COMM=kv_exchange CP_LAYOUT=balanced needs 44.0 GiB for mixed masks, and 59.3 GiB for one causal document.
# With LAYOUT=auto, megacp-plan chooses the parallel layout flags that you do not set (examples/layout.sh).
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
