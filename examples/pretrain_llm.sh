#!/usr/bin/env bash
# Pretrain a language model with torchrun on one machine. Sizes of the grid come from the environment, everything else from
# flags: NPROC=8 TP=2 PP=2 CP=2 bash examples/pretrain_llm.sh --data-path DIR --train-iters 1000
# Data parallelism takes what remains: dp = NPROC / (TP x PP x CP).
set -euo pipefail
cd "$(dirname "$0")/.."
NPROC=${NPROC:-1}
TP=${TP:-1}
PP=${PP:-1}
CP=${CP:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec torchrun --standalone --nproc-per-node "$NPROC" -m megacp.train \
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP" --context-parallel-size "$CP" \
    --num-layers 8 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8 --num-query-groups 4 --qk-layernorm \
    --global-batch-size 32 --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 50 \
    "$@"
