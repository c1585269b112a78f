"""Process groups: grids of ranks, the axes that layers communicate over, collectives and their duals, and fake worlds.

It imports torch and nothing else of megacp.
"""
