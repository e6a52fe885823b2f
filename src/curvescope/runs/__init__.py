"""Run folders, resumable pieces of work, and results: the code that studies and papers share."""
