"""Image and video preprocessing of each vision family."""
