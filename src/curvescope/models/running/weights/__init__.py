"""Where the weights of a layer come from: pieces of several ranks, or half precision."""
