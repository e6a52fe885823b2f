"""The questions, a file each: what is measured, and what follows from it."""
