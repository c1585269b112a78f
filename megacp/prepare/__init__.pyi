# Types of the names that __init__.py imports when they are first used.
from megacp.prepare.packs.run import build as build
from megacp.prepare.packs.settings import BuildSettings as BuildSettings
