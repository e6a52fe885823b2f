"""The zoo: a readable Transformer and an MLP, and the folders they are saved in."""
