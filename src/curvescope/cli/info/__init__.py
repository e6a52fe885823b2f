"""`curvescope info`: what a model is made of, and what a study of it would take."""
