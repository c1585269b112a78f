"""Images and videos: bytes to pixels, pixels to crops and pooled tokens, and which rank encodes
which.
"""
