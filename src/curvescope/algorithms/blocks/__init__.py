"""All blocks of an operator at once: norms of pairs, probes of their own, how spectra differ."""
