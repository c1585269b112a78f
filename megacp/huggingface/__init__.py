"""Conversion to and from Hugging Face folders, and text generation.

`convert` runs a `Request`; `open_session` loads a checkpoint that answers prompts.
"""

from megacp.public import exports

__getattr__ = exports(
    __name__,
    {
        "Request": "convert.export",
        "convert": "convert.export",
        "open_session": "generate_command",
    },
)
