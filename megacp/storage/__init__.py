"""Files and object stores: durable writes, locks, hashes, and reading from URLs.

It imports nothing else of megacp.
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
