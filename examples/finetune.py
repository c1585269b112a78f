"""Build packs, train a model and ask it questions, as notebook cells or as a script.

    python examples/finetune.py

A tiny model learns three answers on two CPU ranks, in less than a minute. For your own data, set
`input` to your records, set `tokenizer` and "load_hf" to the folder of a model, set `chat_template`
to "auto", and remove the sizes. All names are flags.
"""

# %% Records
import json
import sys
from pathlib import Path

from megacp.huggingface.generate_command import open_session
from megacp.prepare.packs.run import build
from megacp.prepare.packs.settings import BuildSettings
from megacp.train import train

FOLDER = Path(sys.argv[1] if sys.argv[1:] else "runs/finetune")
ANSWERS = {
    "Who are you?": "Ada, a tiny model.",
    "What do you like?": "Long rows.",
    "Bye": "See you.",
}
FOLDER.mkdir(parents=True, exist_ok=True)
# Each line of JSONL is one conversation: a question and its answer.
chats = [
    [{"role": "user", "content": q}, {"role": "assistant", "content": a}]
    for q, a in ANSWERS.items()
]
(FOLDER / "chats.jsonl").write_text(
    "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
)

# %% Packs
records, packs = str(FOLDER / "chats.jsonl"), str(FOLDER / "packs")
build(
    BuildSettings(input=(records,), output=packs, tokenizer="byte", seq_length=128),
    sys.stdout,
    overwrite=True,
)

# %% Training: two processes on this machine share the tokens of each row
sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128}
steps = {"train_iters": 100, "lr": 5e-3, "global_batch_size": 1, "log_interval": 20}
places = {"data_path": packs, "save": FOLDER / "model", "auto_resume": True}
train({**sizes, **steps, **places, "context_parallel_size": 2}, nproc=2)

# %% Questions
session = open_session(str(FOLDER / "model"))
for question in ANSWERS:
    print(question, session.ask(question))
