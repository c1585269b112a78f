"""Process groups: grids of ranks, the axes that layers communicate over, collectives and their
duals, and fake worlds.

A layer that communicates holds one `Axis`. It imports torch and nothing else of megacp.
"""

from megacp.public import exports

__getattr__ = exports(
    __name__,
    {
        "Axis": "grid",
        "GridShape": "shape",
        "ProcessGrid": "grid",
        "axis_of_mesh": "grid",
        "build_grid": "grid",
        "single_axis": "grid",
    },
)
