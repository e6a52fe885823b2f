"""A study on several ranks: one folder for all of them, and pieces that they take apart."""
