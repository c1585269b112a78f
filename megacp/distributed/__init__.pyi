# Types of the names that __init__.py imports when they are first used.
from megacp.distributed.grid import Axis as Axis
from megacp.distributed.grid import ProcessGrid as ProcessGrid
from megacp.distributed.grid import axis_of_mesh as axis_of_mesh
from megacp.distributed.grid import build_grid as build_grid
from megacp.distributed.grid import single_axis as single_axis
from megacp.distributed.shape import GridShape as GridShape
