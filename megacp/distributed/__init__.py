"""Process groups: grids of ranks, axes for the communication of layers, collectives with gradients,
and fake worlds for checks.

A layer that communicates has one `Axis`. Apart from `megacp.public`, the package depends only on
torch and numpy.
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
