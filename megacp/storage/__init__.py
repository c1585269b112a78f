"""Files and object stores: durable writes, locks, hashes, and access to URLs.

Apart from `megacp.public`, the package imports nothing of megacp.
"""

from megacp.public import exports

__getattr__ = exports(
    __name__,
    {
        "Place": "place",
        "Url": "url",
        "is_url": "url",
        "open_stream": "place",
        "place_of": "place",
        "read_content": "place",
        "write_content": "place",
    },
)
