"""Record repeated products and replay them: operations on a CPU, a CUDA graph on a GPU."""
