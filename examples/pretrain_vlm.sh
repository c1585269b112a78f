#!/usr/bin/env bash
# Train an 8B Molmo2-like model on packs of 36,864 tokens with images, on one machine of 8 GPUs:
#     bash examples/pretrain_vlm.sh --data-path DIR --save DIR
# Rows with images and branches use FlexAttention, and ranks exchange only the keys that they need (kv_exchange). If
# Transformer Engine is installed, its linear layers, norms and optimizer are used (--transformer-impl auto). For several
# machines, see examples/slurm/pretrain_vlm.sbatch.
# With LAYOUT=auto, megacp-plan chooses the parallel layout flags that you do not set (examples/layout.sh).
#
# Memory of one rank, estimated by: TP=1 CP=8 RECOMPUTE=selective SHARD=optim_grads_params bash examples/pretrain_vlm.sh --dry-run --world-size 8
# (not measured on a GPU; leave some GiB for CUDA, NCCL and fragmentation). The first row is the default: it has no
# tensor-parallel communication, full sharding's gathers overlap with matrix products, and no whole block is recomputed.
#    8 GPUs  TP=1 CP=8 RECOMPUTE=selective SHARD=optim_grads_params  46.1 GiB
#    8 GPUs  TP=1 CP=4 RECOMPUTE=selective SHARD=optim_grads_params  70.8 GiB
#    8 GPUs  TP=1 CP=2 RECOMPUTE=full SHARD=optim_grads_params       38.4 GiB
#    8 GPUs  TP=4 CP=2 RECOMPUTE=selective SHARD=optim               56.0 GiB
#    8 GPUs  TP=4 CP=2 RECOMPUTE=full SHARD=optim                    32.6 GiB
set -euo pipefail
cd "$(dirname "$0")/.."
NPROC=${NPROC:-8}
if [[ ${LAYOUT:-} != auto ]]; then
    TP=${TP:-1}
    CP=${CP:-8}
    RECOMPUTE=${RECOMPUTE:-selective}
    SHARD=${SHARD:-optim_grads_params}
    OFFLOAD=${OFFLOAD:-0}
    MLP=${MLP:-0}
    COMM=kv_exchange
    CP_LAYOUT=balanced
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
# Use a new rendezvous store after each restart. Otherwise a machine that replaces a lost one cannot join.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
run=(--config examples/molmo2_8b.yaml
    --seq-length 36864 --micro-batch-size 1 --global-batch-size 64
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
