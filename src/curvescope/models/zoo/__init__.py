"""The zoo: a readable Transformer and an MLP, and the folders they are saved in."""

from curvescope.models.zoo.folder import build, bundled, read_folder, save, zoo_model

__all__ = ["build", "bundled", "read_folder", "save", "zoo_model"]
