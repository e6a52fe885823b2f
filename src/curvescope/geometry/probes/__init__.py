"""Words as probes of heads: the keys that their queries look for, and what their values write."""
