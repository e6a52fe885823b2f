"""Which parameters a problem is about: words for them, what they match, what is frozen."""
