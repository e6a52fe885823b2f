"""What happens to a module while it runs: parts exchanged under its lock, our kernels in, casts left out."""
