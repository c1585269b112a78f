"""Conversion to and from Hugging Face folders, and generation.

`convert` carries out a `Request`; `open_session` answers prompts.
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
