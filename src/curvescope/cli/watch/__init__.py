"""`curvescope watch`: a training run while it goes on."""
