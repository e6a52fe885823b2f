"""Command line input: options that commands share, settings, completion of names."""
