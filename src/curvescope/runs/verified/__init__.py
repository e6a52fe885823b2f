"""What a run checks of its operators before it measures anything, and what it says of that."""
