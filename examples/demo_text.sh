#!/usr/bin/env bash
# Train a language model on a laptop. The script
#   1. packs text and trains on 8 CPU ranks (dp 1 x tp 2 x pp 2 x cp 2),
#   2. stops the run halfway with SIGTERM, and resumes it on another grid (dp 2 x tp 1 x pp 2 x cp 2),
#   3. draws the training and validation loss, and samples text.
# OUT (default demo_out) is the folder for all results; it must not exist yet. STEPS sets the length of the run.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-demo_out}
STEPS=${STEPS:-200}
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120 # torchrun kills ranks after 30 s by default, even while they save
if [ -e "$OUT" ]; then
    echo "error: $OUT exists; remove it or choose another folder: OUT=somewhere make demo-text" >&2
    exit 2
fi
mkdir -p "$OUT"
# Show a command, then run it.
show() { printf '\n$'; printf ' %s' "$@"; printf '\n'; "$@"; }

show python examples/stdlib_to_jsonl.py --output "$OUT/text" --megabytes 8
show python tools/train_tokenizer.py --input "$OUT/text/train.jsonl" --output "$OUT/tokenizer.json" --vocab-size 2048
for split in train valid; do
    show python tools/preprocess_data.py build --input "$OUT/text/$split.jsonl" --output "$OUT/$split" \
        --tokenizer "$OUT/tokenizer.json" --seq-length 512 --oversize split --workers 2
done

cat > "$OUT/model.yaml" <<YAML
# A small Qwen3-like decoder.
num_layers: 4
hidden_size: 128
ffn_hidden_size: 384
num_attention_heads: 4
num_query_groups: 2
qk_layernorm: head
seq_length: 512
global_batch_size: 4
train_iters: $STEPS
lr: 3.0e-3
min_lr: 3.0e-4
lr_warmup_iters: 20
lr_decay_style: cosine
eval_interval: 100
eval_iters: 2
log_interval: 10
YAML
data=(--config "$OUT/model.yaml" --data-path "$OUT/train" --valid-data-path "$OUT/valid" --save "$OUT/checkpoints")

show python -m megacp.train --dry-run --world-size 8 "${data[@]}" \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2

first=(torchrun --standalone --nproc-per-node 8 -m megacp.train "${data[@]}"
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2)
printf '\n$'; printf ' %s' "${first[@]}"; printf ' &\n'
"${first[@]}" > >(tee "$OUT/first.txt") 2> "$OUT/first.err" &
run=$!
half=$((STEPS / 2))
# Wait until the log has half of the steps, then stop the run as a cluster's scheduler would.
while kill -0 "$run" 2> /dev/null; do
    steps=$(grep -c '"kind": "train"' "$OUT/checkpoints/log.jsonl" 2> /dev/null || true)
    if [ "${steps:-0}" -ge "$half" ]; then
        printf '\n$ kill -TERM %s\n' "$run"
        kill -TERM "$run"
        break
    fi
    sleep 0.2
done
wait "$run" || true
if ! grep -q 'stopped on request' "$OUT/first.txt"; then
    echo "error: the first run did not stop on SIGTERM; its messages are in $OUT/first.err" >&2
    tail -n 20 "$OUT/first.err" >&2
    exit 1
fi
resumed=$(grep -c '"kind": "train"' "$OUT/checkpoints/log.jsonl")

show torchrun --standalone --nproc-per-node 8 -m megacp.train "${data[@]}" --load "$OUT/checkpoints" \
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --context-parallel-size 2

show python tools/plot_log.py --log "$OUT/checkpoints/log.jsonl" --output "$OUT/loss.png" --mark "$resumed"
show python tools/generate.py --checkpoint "$OUT/checkpoints" --tokenizer "$OUT/tokenizer.json" \
    --prompt 'def __init__(self' --prompt 'import ' --max-new-tokens 48 --temperature 0.7 | tee "$OUT/sample.txt"
echo
echo "All results are in $OUT: loss.png, sample.txt, checkpoints/ (each with its resolved config), checkpoints/log.jsonl"
