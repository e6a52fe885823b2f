"""What a monitored run says of itself: in numbers, in notes, at its end."""
