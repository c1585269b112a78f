#!/usr/bin/env bash
# Train a vision-language model on a laptop. The script
#   1. writes scans of digits as PNG files with questions in JSONL, trains a tokenizer, and packs the records,
#   2. trains on 8 CPU ranks (tp 2 x pp 2 x cp 2),
#   3. asks about held-out scans, and counts the right answers to each question,
#   4. exports the model to Hugging Face format, and gets the same answers from the transformers library.
# OUT (default demo_out) is the folder for all results; it must not exist yet. STEPS and RECORDS set the length of the
# run. GOAL is the share of single held-out scans that must be read correctly. MODEL is molmo2, qwen3_5 or moe (qwen3_5
# with experts, which four ranks share).
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-demo_out}
STEPS=${STEPS:-450}
RECORDS=${RECORDS:-16000}
GOAL=${GOAL:-0.9}
MODEL=${MODEL:-molmo2}
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
if [ -e "$OUT" ]; then
    echo "error: $OUT exists; remove it or choose another folder: OUT=somewhere make demo" >&2
    exit 2
fi
mkdir -p "$OUT"
symbols=('<|user|>' '<|assistant|>')
images=(--image-size 16 --patch-size 4 --overlap-margins 0,0 --max-crops 1)
if [ "$MODEL" != molmo2 ]; then
    symbols+=('<|image_pad|>' '<|video_pad|>' '<|vision_start|>' '<|vision_end|>')
    images=(--vision-family qwen3_5 --patch-size 4 --merge-size 2 --resize-pixels 256,256)
fi
# Show a command, then run it.
show() { printf '\n$'; printf ' %s' "$@"; printf '\n'; "$@"; }

show python examples/digits_to_jsonl.py --output "$OUT/digits" --records "$RECORDS" --single 0.6
show python tools/train_tokenizer.py --input "$OUT/digits/train.jsonl" --output "$OUT/tokenizer.json" \
    --vocab-size 330 --symbols "${symbols[@]}"
for split in train held_out; do
    show python tools/preprocess_data.py build --input "$OUT/digits/$split.jsonl" --output "$OUT/$split" \
        --tokenizer "$OUT/tokenizer.json" --seq-length 1024 --image-root "$OUT/digits/images" \
        "${images[@]}" --cp-degrees 1,2 --seed 0 --workers 2
done

case $MODEL in
molmo2) cat > "$OUT/model.yaml" <<YAML ;;
# A small Molmo2: a ViT of 2 layers on crops of 16 pixels, and a decoder of 2 layers.
num_layers: 2
num_query_groups: 2
additional_vocab_size: 8
vision_feature_layers: [-1, -2]
connector_ffn_hidden_size: 128
# The number of crops in these packs. By default, the plan assumes a row full of images, which would leave the first
# stage without decoder layers.
vision_planned_crops: 36
YAML
qwen3_5 | moe) cat > "$OUT/model.yaml" <<YAML ;;
# A small Qwen3.5: a ViT of 2 layers on images of 4 x 4 patches, and a decoder with a gated delta rule and attention.
num_layers: 2
num_query_groups: 2
linear_attention_freq: "2"
linear_num_key_heads: 4
linear_num_value_heads: 4
linear_key_head_dim: 16
linear_value_head_dim: 16
attention_output_gate: true
apply_layernorm_1p: true
rotary_percent: 0.5
mrope_section: [2, 1, 1]
image_attention: causal
vision_family: qwen3_5
vision_planned_crops: 576
YAML
*) echo "error: MODEL is $MODEL, expected molmo2, qwen3_5 or moe" >&2 && exit 2 ;;
esac
[ "$MODEL" != moe ] || cat >> "$OUT/model.yaml" <<YAML
# Two of eight experts for each token, and a shared expert for all tokens.
num_experts: 8
moe_router_topk: 2
moe_ffn_hidden_size: 96
moe_shared_expert_intermediate_size: 96
moe_shared_expert_gate: true
moe_aux_loss_coeff: 0.01
expert_model_parallel_size: 4
YAML
cat >> "$OUT/model.yaml" <<YAML
hidden_size: 64
ffn_hidden_size: 192
num_attention_heads: 4
qk_layernorm: head
untie_embeddings_and_output_weights: true
vision_num_layers: 2
vision_hidden_size: 64
vision_ffn_hidden_size: 192
vision_num_attention_heads: 4
vision_patch_size: 4
vision_image_size: 16
seq_length: 1024
global_batch_size: 2
# 1 / sqrt(hidden_size) preserves the scale of the inputs of linear layers. With the default of 0.02, such a narrow
# model does not learn to use its images within the steps of this run.
init_method_std: 0.125
train_iters: $STEPS
lr: 1.0e-3
min_lr: 1.0e-4
# A third of the run. With 30 steps, the decoder settles before the image features are useful, and reads 10 % fewer
# scans.
lr_warmup_iters: $((STEPS / 3))
weight_decay: 0.05
eval_interval: 150
eval_iters: 4
log_interval: 10
YAML
run=(--config "$OUT/model.yaml" --data-path "$OUT/train" --valid-data-path "$OUT/held_out" --save "$OUT/checkpoints"
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2
    --cp-comm-type kv_exchange --cp-layout balanced)
show python -m megacp.train --dry-run --world-size 8 "${run[@]}"
show torchrun --standalone --nproc-per-node 8 -m megacp.train "${run[@]}"

show python tools/plot_log.py --log "$OUT/checkpoints/log.jsonl" --output "$OUT/loss.png"
show python tools/generate.py --checkpoint "$OUT/checkpoints" --tokenizer "$OUT/tokenizer.json" --input "$OUT/digits/held_out.jsonl" \
    --image-root "$OUT/digits/images" --output "$OUT/answers.jsonl" --max-new-tokens 8
cp "$(ls -d "$OUT"/checkpoints/step_* | tail -n 1)/config.yaml" "$OUT/config.yaml"
status=0
show python examples/evaluate_digits.py --answers "$OUT/answers.jsonl" --images "$OUT/digits/images" \
    --page "$OUT/samples.html" --goal "$GOAL" | tee "$OUT/accuracy.txt" || status=$?
to_hf=(python tools/convert_checkpoint.py --from megacp --to hf --input "$OUT/checkpoints" --output "$OUT/hf")
if [ "$MODEL" != molmo2 ]; then # transformers ignores the pre-tokenizer of tokenizer.json for this model, so --verify fails for the export
    show "${to_hf[@]}"
    show python tools/convert_checkpoint.py --from hf --to megacp --input "$OUT/hf" --output "$OUT/back" --verify
else
    show "${to_hf[@]}" --tokenizer "$OUT/tokenizer.json" --verify
    show python examples/answer_with_transformers.py --model "$OUT/hf" --answers "$OUT/answers.jsonl" \
        --images "$OUT/digits/images" || status=$?
fi
echo
echo "$((SECONDS / 60)) min $((SECONDS % 60)) s. All results are in $OUT: accuracy.txt, samples.html (answers with images, wrong ones first), loss.png,"
echo "checkpoints/, config.yaml (the resolved config), hf/ (for transformers), answers.jsonl, digits/ (PNG and JSONL)"
exit "$status"
