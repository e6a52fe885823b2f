"""One file for every subject that is checked: from what was measured to findings. Nothing is measured here."""
