"""`megacp.finetune(...)`: fine-tuning from a Python script or a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megacp.engine.config.run import Value
from megacp.finetuning import run
from megacp.finetuning.flags import flag_words
from megacp.finetuning.request import FinetuneRequest
from megacp.finetuning.steps import Failure
from megacp.training.start.status import REFUSED, STOPPED


def finetune(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    output: str | Path,
    *,
    nproc: int | None = None,
    verify: bool = True,
    **flags: Value,
) -> Path:
    """Fine-tune a model as `megacp finetune` does, and return the folder with the result.

    `model` is a folder or a name on the Hugging Face Hub, and `data` is a file or several. `nproc`
    is the number of GPUs or CPU ranks. `flags` are flags of the command by name, such as
    `train_epochs=2` or `lora_rank=16`. Raise ValueError if the request is refused, RuntimeError if
    a step fails, and KeyboardInterrupt if training stopped early and saved: the same call resumes.
    """
    files = [data] if isinstance(data, str | Path) else data
    request = FinetuneRequest(
        model=str(model),
        data=tuple(map(str, files)),
        output=Path(output),
        nproc=nproc,
        verify=verify,
        words=tuple(flag_words(flags)),
    )
    try:
        status = run.run_finetuning(request)
    except Failure as failure:
        message = str(failure)
        if failure.status == REFUSED:
            raise ValueError(message) from failure
        raise RuntimeError(message) from failure
    if status == STOPPED:
        raise KeyboardInterrupt("training stopped early and saved; the same call resumes")
    return request.output / run.RESULT
