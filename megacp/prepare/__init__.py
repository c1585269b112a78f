"""Turn records into packed datasets.

`build` reads records in any supported form and writes a dataset according to `BuildSettings`.
"""

from megacp.public import exports

__getattr__ = exports(
    __name__,
    {
        "BuildSettings": "packs.settings",
        "build": "packs.run",
    },
)
