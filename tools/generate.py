"""Sample text from a megacp checkpoint on one process.

python tools/generate.py --checkpoint out/checkpoints --tokenizer out/tokenizer.json --prompt "def main"
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megacp.data.tokenizer import load_tokenizer
from megacp.training.generate import Generator


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, load, print the prompt with its continuation; exit status 2 with one message on bad input."""
    parser = argparse.ArgumentParser(description="Sample text from a checkpoint that any grid wrote.")
    parser.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="--save directory of a run, or one step of it"
    )
    parser.add_argument(
        "--tokenizer", required=True, metavar="KIND_OR_PATH", help="as given to preprocess_data.py build"
    )
    parser.add_argument("--prompt", action="append", required=True, help="text to continue; may be repeated")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token (default)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling")
    arguments = parser.parse_args(argv)
    if arguments.temperature < 0:
        parser.error(f"--temperature {arguments.temperature}: must be 0 or more")
    try:
        tokenizer = load_tokenizer(arguments.tokenizer)
        generator = Generator(arguments.checkpoint)
        if generator.tokenizer_sha256 and tokenizer.sha256 != generator.tokenizer_sha256:
            raise ValueError(f"--tokenizer {arguments.tokenizer} is not the one that {generator.path} was trained with")
        if tokenizer.vocab_size > generator.config.model.embedding_rows:
            raise ValueError(
                f"--tokenizer {arguments.tokenizer} has {tokenizer.vocab_size} ids, "
                f"the model was trained with {generator.config.model.embedding_rows}"
            )
        print(f"{generator.path} after step {generator.step}")
        for index, prompt in enumerate(arguments.prompt):
            tokens = tokenizer.encode([prompt])[0]
            new = generator.sample(
                tokens,
                arguments.max_new_tokens,
                temperature=arguments.temperature,
                seed=arguments.seed + index,
                eos=tokenizer.eos_id,
            )
            print(f"--- {prompt!r}\n{prompt}{tokenizer.decode(new)}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
