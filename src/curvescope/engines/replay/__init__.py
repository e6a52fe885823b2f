"""Work that is asked for again, written down and replayed: operations on a CPU, a graph on a GPU."""
