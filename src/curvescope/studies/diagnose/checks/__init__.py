"""One file for every subject that is checked: from measurements to findings."""
