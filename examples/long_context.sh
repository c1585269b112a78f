#!/usr/bin/env bash
# Train the 8B model on packs of 131,072 tokens (long videos, books) on one machine with 8 GPUs of 80 GB:
#     bash examples/long_context.sh --data-path DIR --save DIR
# For several machines, see examples/slurm/long_context.sbatch. Packs with only text, or with --image-attention causal,
# are causal. If Transformer Engine is installed, they use cuDNN's attention with any transport and token layout.
# COMM=p2p CP_LAYOUT=zigzag_document selects Transformer Engine's ring.
# With LAYOUT=auto, megacp-plan chooses the parallel layout flags that you do not set (examples/layout.sh).
#
# Memory of one rank, estimated by: TP=1 CP=8 RECOMPUTE=full SHARD=optim_grads_params bash examples/long_context.sh --dry-run --world-size 8
# (not measured on a GPU). The first row is the default: parameters and gradients are sharded across dp x cp, without
# tensor-parallel communication.
#    8 GPUs  TP=1 CP=8 RECOMPUTE=full SHARD=optim_grads_params  37.7 GiB
#            weights 4.03, gradients 4.03, optimizer 8.07, table 6.54, activations 14.2, block 4.22, head 2.98 GiB
#    8 GPUs  TP=4 CP=2 RECOMPUTE=full SHARD=optim               52.6 GiB
set -euo pipefail
cd "$(dirname "$0")/.."
NPROC=${NPROC:-8}
if [[ ${LAYOUT:-} != auto ]]; then
    TP=${TP:-1}
    CP=${CP:-8}
    RECOMPUTE=${RECOMPUTE:-full}
    SHARD=${SHARD:-optim_grads_params}
    OFFLOAD=${OFFLOAD:-0}
    MLP=${MLP:-0}
    COMM=${COMM:-kv_exchange}
    CP_LAYOUT=${CP_LAYOUT:-balanced}
fi
SEQ=${SEQ:-131072}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
# Use a new rendezvous store after each restart. Otherwise a machine that replaces a lost one cannot join.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
run=(--config examples/molmo2_8b.yaml
    --seq-length "$SEQ" --micro-batch-size 1 --global-batch-size 16
    ${TP:+--tensor-model-parallel-size "$TP"} ${CP:+--context-parallel-size "$CP"}
    ${RECOMPUTE:+--recompute-granularity "$RECOMPUTE"} ${SHARD:+--data-parallel-sharding-strategy "$SHARD"}
    ${OFFLOAD:+--activation-offload "$OFFLOAD"} ${MLP:+--mlp-chunk-tokens "$MLP"}
    ${COMM:+--cp-comm-type "$COMM"} ${CP_LAYOUT:+--cp-layout "$CP_LAYOUT"}
    "$@")
. examples/layout.sh
add_layout "$NPROC"
# With one hardware queue, a tensor-parallel collective starts before the product that hides it. Full sharding needs more
# queues, because its gathers would delay all products in the same queue.
if [[ ${TP:-1} -gt 1 && ${SHARD:-} != optim_grads_params ]]; then
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
fi
[[ " $* " == *" --dry-run "* ]] && exec python -m megacp.train "${run[@]}"
# Check the configuration in one process first, because torchrun buries an error in a long report.
python -m megacp.train "${run[@]}" --dry-run --world-size "$NPROC" > /dev/null
exec torchrun --standalone --nproc-per-node "$NPROC" -m megacp.train "${run[@]}"
