"""Preparation: records become packed datasets.

`build` reads records in any of the supported forms and writes a dataset, as `BuildSettings` say.
"""

from megacp.public import exports

__getattr__ = exports(
    __name__,
    {
        "BuildSettings": "packs.settings",
        "build": "packs.run",
    },
)
